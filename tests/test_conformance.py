"""The conformance suite against the real agent, in bare namespaces and inside gVisor, and against the agent of pods.

A normal run has all of it once on each kernel: on Linux here, on gVisor in sandboxes of the engine
(engine/test_conformance.py). The others have a share (shares.py), gVisor here what those have no place for as well; a
soak has everything everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from k8e.conformance import CHECKS, Check, run_check
from tests.changes import current_changes
from tests.sandboxes import KINDS, Linked, open_sandbox
from tests.shares import choose


class Shared:
    """One sandbox for all checks; a check that fails may have broken it, so the next one gets a new one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stack = contextlib.AsyncExitStack()
        self._linked: Linked | None = None

    async def __aenter__(self) -> Shared:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._linked = None
        await self._stack.aclose()

    async def run(self, check: Check) -> None:
        if self._linked is None:
            self._linked = await self._stack.enter_async_context(open_sandbox(self._kind))
        linked, self._linked = self._linked, None
        subject = await linked.subject(check.name)
        assert check.needs <= subject.provides | {"inotify_limit"}
        if not check.needs <= subject.provides:
            self._linked = linked
            pytest.skip(f"this sandbox has no {', '.join(check.needs - subject.provides)}")
        try:
            await run_check(check, subject)
            await linked.clean(subject)
            self._linked = linked
        finally:
            if self._linked is None:
                await self._stack.aclose()


def always(check: Check) -> bool:
    return bool(check.needs & {"small", "read_only"}) or current_changes().touch_function(check.run)


CASES = [(kind, check) for kind in KINDS for check in (CHECKS if kind == "bare" else choose(CHECKS, always=always))]
# Over the channel of pods: the same agent behind another transport, so other checks than gVisor has on the same day.
CASES += [("pod", check) for check in choose(CHECKS, turn=1)]


@pytest.fixture(scope="module")
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    async with Shared(request.param) as shared:
        yield shared


@pytest.mark.parametrize(
    ("shared", "check"),
    CASES,
    indirect=["shared"],
    scope="module",  # else pytest makes a sandbox for each check
    ids=[f"{kind}-{check.name}" for kind, check in CASES],
)
async def test_conformance(shared: Shared, check: Check) -> None:
    await shared.run(check)


def test_the_suite_is_the_promised_one() -> None:
    assert len(CHECKS) >= 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)
