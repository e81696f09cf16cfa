"""`k8e doctor` on virtual machines: it tries to get past every control, as with the other runtimes."""

from __future__ import annotations

from k8e.engine.local.doctor.controls import CONTROLS
from k8e.engine.local.doctor.decoys import plant_decoys
from k8e.engine.local.doctor.doctor import LIMITS, _examine_runtime
from k8e.engine.report import Verdict
from tests.engine.rig import Rig
from tests.engine.vm.conftest import on_its_day

pytestmark = on_its_day(2)


async def test_every_control_is_tried_and_holds(rig: Rig) -> None:
    async with plant_decoys(rig.engine.layout.state) as decoys:
        found = await _examine_runtime(rig.engine, rig.report, decoys, LIMITS, lambda runtime, check: None, None)
    assert len(found.checks) == len(CONTROLS)
    assert {check.name: check.found for check in found.checks if check.verdict is Verdict.FAILED} == {}
    skipped = {check.name for check in found.checks if check.verdict is Verdict.SKIPPED}
    # There is no other host here for a sandbox to reach.
    assert skipped <= {"listed host", "unlisted names", "machine's services", "metadata"}, skipped
