"""The conformance suite against the real agent, in bare namespaces and inside gVisor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from k8e.conformance import CHECKS, Check, run_check
from tests.sandboxes import KINDS, Linked, open_sandbox


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


@pytest.fixture(scope="module", params=KINDS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    async with Shared(request.param) as shared:
        yield shared


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_conformance(shared: Shared, check: Check) -> None:
    await shared.run(check)


def test_the_suite_is_the_promised_one() -> None:
    assert len(CHECKS) >= 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)
