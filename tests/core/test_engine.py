"""The stand-in under core's, the gateway's and the command line's tests keeps the contract of engines that the real
ones keep (engine/test_contract.py)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.engine import Refusal, Runtime, SandboxSpec
from k8e.engine.conformance import CHECKS, Check, Subject, run_check
from tests.core.bare_engine import BareEngine
from tests.sandboxes import needs_root

pytestmark = needs_root

# It shows no directory of the machine: those who test that use the real one.
CHOSEN = [check for check in CHECKS if "mounts" not in check.needs]


@pytest.fixture
async def subject(folder: Path) -> AsyncIterator[Subject]:
    engine = BareEngine(folder / "sandboxes")

    async def in_force(name: str, address: str) -> bool:
        return address in engine.egress(name)

    async def have_refused(name: str) -> None:
        engine.refuse(name, Refusal("name.test", "", 0, "not_allowed", time.time()))

    async def kill(name: str) -> None:
        engine.kill_sandbox(name)

    async def starve(name: str) -> None:
        engine.count_oom_kill(name)

    async def crash(action: str, name: str, seconds: float) -> float:
        command = (sys.executable, "-m", "tests.core.doomed_engine", folder / "sandboxes", action, name)
        daemon = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert daemon.stdout is not None
        assert await daemon.stdout.readline() == b"begins\n"
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                assert await daemon.wait() == 0
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()
        return time.monotonic() - began

    yield Subject(
        engine=engine,
        spec=SandboxSpec(Runtime.NATIVE),
        again=lambda: BareEngine(folder / "sandboxes"),
        in_force=in_force,
        have_refused=have_refused,
        kill=kill,
        starve=starve,
        crash=crash,
    )
    await engine.close()


@pytest.mark.parametrize("check", CHOSEN, ids=lambda check: check.name)
async def test_contract(subject: Subject, check: Check) -> None:
    assert check.needs <= subject.provides
    await run_check(check, subject)


def test_what_is_left_out_is_about_mounts_alone() -> None:
    assert len(CHECKS) - len(CHOSEN) == 3
