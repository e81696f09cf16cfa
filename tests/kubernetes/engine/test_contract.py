"""The contract of engines, with the Kubernetes engine and real pods, under runc and gVisor.

What it does not do yet is listed by check, and has to fail: on the day that it works its line here goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from k8e.engine import EngineError, Runtime
from k8e.engine.conformance import CHECKS, Check, Subject, run_check
from tests.kubernetes.engine.rig import Site, open_engine, spec_of

HOSTS = "lists of hosts are refused"
NOT_YET = {
    "a_list_is_in_force_when_it_is_created": HOSTS,
    "a_list_is_in_force_before_the_first_process": HOSTS,
    "nothing_is_reachable_that_nothing_was_said_of": "this cluster's network enforces no policy",
    "a_changed_list_is_in_force_when_it_returns": HOSTS,
    "a_list_is_one_sandboxes_own": HOSTS,
    "the_next_daemon_leaves_a_list_in_force_and_can_change_it": HOSTS,
    "one_that_is_started_has_the_list_that_it_is_started_with": HOSTS,
    "refusals_are_told_once_and_to_whom_they_belong": "a network policy tells nothing",
    "refusals_of_one_that_died_are_told": "a network policy tells nothing",
}


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: runtime.value)
async def subject(request: pytest.FixtureRequest, site_with_volumes: Site) -> AsyncIterator[Subject]:
    site = site_with_volumes

    async def in_force(name: str, address: str) -> bool:
        raise EngineError("network", "nothing is enforced here")

    async def have_refused(name: str) -> None:
        raise EngineError("network", "nothing is refused here")

    async def kill(name: str) -> None:
        await asyncio.to_thread(site.kill, name)

    async def discard(kept: str) -> None:
        kind, _, name = kept.split("/")
        await asyncio.to_thread(site.kubectl, "delete", f"{kind}/{name}")

    async with open_engine(site) as engine:
        yield Subject(
            engine=engine,
            spec=spec_of(request.param),
            again=site.engine,
            in_force=in_force,
            have_refused=have_refused,
            kill=kill,
            # gVisor sees the tmpfs of the node through its own protocol, unless containerd hands it pods' annotations.
            run_kind="tmpfs" if request.param is Runtime.NATIVE else "v9fs",
            agent_apart=False,  # both are user 1000
            discard=discard,
        )


def list_cases() -> list[object]:
    return [
        pytest.param(
            check,
            id=check.name,
            marks=[pytest.mark.xfail(reason=NOT_YET[check.name], raises=EngineError)] if check.name in NOT_YET else [],
        )
        for check in CHECKS
    ]


@pytest.mark.parametrize("check", list_cases())
async def test_contract(subject: Subject, check: Check) -> None:
    if not check.needs <= subject.provides:
        pytest.skip(f"not here: {', '.join(check.needs - subject.provides)}")
    await run_check(check, subject)
