"""The conformance suite in real pods, through the engine and the encrypted channel, under runc and gVisor.

Checks that need two users inside are listed: a restricted pod has one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from k8e.conformance import CHECKS, Check, Subject, run_check
from k8e.engine import Limits, Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of

LIMITS = Limits(cpus=2.0, memory=2 << 30, disk=512 << 20)
BULK = 16 << 20
TWO_USERS = frozenset(
    {
        "agents_own_identity_is_root",
        "agent_is_itself_again_after_acting_for_somebody",
        "capabilities_are_kept_on_request",
        "group_gives_access",
        "ids_and_groups_are_applied",
        "new_things_belong_to_their_maker",
        "other_peoples_files_are_denied",
        "public_files_are_read_by_everybody",
        "timeout_ends_commands_that_others_stop",
    }
)


@dataclass(slots=True)
class Shared:
    """One sandbox for all checks; a check that fails may have broken it, so the next one gets a new one."""

    engine: KubernetesEngine
    runtime: Runtime
    name: str = ""

    async def run(self, check: Check) -> None:
        if not self.name:
            name = new_name()
            await self.engine.create(name, replace(spec_of(self.runtime), limits=LIMITS))
            self.name = name
        name, self.name = self.name, ""
        try:
            await self._run(check, name)
            self.name = name
        finally:
            if not self.name:
                await self.engine.destroy(name)

    async def _run(self, check: Check, name: str) -> None:
        sandbox, place = await self.engine.attach(name)
        directory = b"/workspace/" + check.name.encode()
        assert (await run_script(sandbox, place, f"mkdir -m 0777 {directory.decode()}"))[0] == 0
        subject = Subject(
            sandbox=sandbox, directory=directory, user=place.user, path=dict(place.env)[b"PATH"], bulk=BULK
        )
        await run_check(check, subject)


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: runtime.value)
async def shared(request: pytest.FixtureRequest, site: Site) -> AsyncIterator[Shared]:
    async with open_engine(site) as engine:
        yield Shared(engine, request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_conformance(shared: Shared, check: Check) -> None:
    if check.name in TWO_USERS:
        pytest.skip("a restricted pod has one user")
    if check.needs:
        pytest.skip(f"not here: {', '.join(check.needs)}")
    await shared.run(check)
