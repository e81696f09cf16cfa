"""`k8e doctor` on virtual machines: it tries both runtimes, emulation too, and every control of the one that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8e.engine import Runtime
from k8e.engine.local import LocalEngine
from k8e.engine.local.doctor.controls import CONTROLS
from k8e.engine.local.doctor.doctor import examine_machine
from k8e.engine.local.vm.runtime import VmOptions
from k8e.engine.report import Verdict, render
from tests.engine.answers import plant_answers
from tests.engine.rig import place_for_engine
from tests.engine.traces import wait_for_no_traces
from tests.engine.vm.conftest import on_its_day

pytestmark = [on_its_day(2), pytest.mark.timeout(1200)]


async def test_both_are_tried_and_every_control_of_the_one_that_works_holds(guest: Path) -> None:
    """With the machine's own /dev/kvm. The engine is the doctor's, but that the guest is the tests' own."""

    class Engine(LocalEngine):
        def __init__(self, state: Path, run: Path, *, virtual: VmOptions, **more: Any) -> None:
            assert virtual.emulation, "it tries without being allowed to"
            super().__init__(state, run, virtual=replace(virtual, guest=guest), **more)

    with place_for_engine() as (state, run):
        plant_answers(state)
        report = await examine_machine(state_dir=state, run_dir=run, engine=Engine)
        await wait_for_no_traces(LocalEngine(state, run).layout, set())
    found = {each.report.runtime: each for each in report.examinations}
    kata, micro = found[Runtime.KATA], found[Runtime.FIRECRACKER]
    assert kata.report.available, render(report)
    assert kata.report.emulated, render(report)
    assert [check.name for check in kata.checks] == [control.name for control in CONTROLS]
    assert {check.name: check.found for check in kata.checks if check.verdict is not Verdict.OK} == {}
    assert not micro.report.available, "then it is to be examined here, too"
    assert "firecracker is not installed" in micro.report.reason
    assert micro.report.hint
