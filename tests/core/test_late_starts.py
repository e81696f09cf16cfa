"""Commands whose time is over before they start: nothing of them runs later, the record says so, and no payer's silent
sandbox holds up another payer's commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.access.access import find_payer
from k8e.core.access.turns import Turns
from k8e.core.errors import Kind
from k8e.core.log.audit import Audit
from k8e.core.model import RunResult, RunSpec, Status
from k8e.link.model import ExecSpec
from tests.core.rig import ALICE, BOB, Rig, fault, open_rig
from tests.core.test_silence import stopped

A, B = find_payer(1000, "a"), find_payer(1001, "b")


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    """By the machine's own clock."""
    async with open_rig(folder) as rig:
        yield rig


async def read_events(rig: Rig, run_id: str) -> list[str]:
    """Of one run, when its end is written."""
    async with asyncio.timeout(30):
        while True:
            events = [line["event"] for line in rig.read_audit() if line.get("run") == run_id]
            if "run_ended" in events and "run_started" in events:
                return events
            await asyncio.sleep(0.02)


async def check_nothing_ran(rig: Rig, session: str, result: RunResult) -> None:
    """Everything is told of it, and nothing is kept in memory."""
    assert (result.status, result.exit_code) == (Status.TIMED_OUT, 124)
    async with asyncio.timeout(30):
        while (
            rig.service._endings._settled or not (on_record := await rig.service.runs.list(ALICE, session))[0].exit_code
        ):
            await asyncio.sleep(0.02)
    assert (on_record[0].run_id, on_record[0].status) == (result.run_id, Status.TIMED_OUT)
    assert (await rig.run(session, "ls /workspace/ran")).exit_code != 0


async def test_silent_sandboxes_of_one_payer_hold_up_no_other(rig: Rig) -> None:
    silent, well = await rig.create(), await rig.create(BOB)
    with stopped(rig, silent):
        starting = [
            asyncio.create_task(rig.service.runs.run(ALICE, RunSpec(silent, "true", timeout=5))) for _ in range(64)
        ]
        await asyncio.sleep(0)
        result = await rig.service.runs.run(BOB, RunSpec(well, "echo well", timeout=4))
        assert (result.status, result.stdout) == (Status.COMPLETED, b"well\n")
        assert not any(task.done() for task in starting)
    await asyncio.gather(*starting)


async def test_a_silent_sandbox_holds_up_no_other_session_of_its_payer(rig: Rig) -> None:
    silent, well = await rig.create(), await rig.create()
    with stopped(rig, silent):
        starting = [
            asyncio.create_task(rig.service.runs.run(ALICE, RunSpec(silent, "true", timeout=20))) for _ in range(8)
        ]
        await asyncio.sleep(0)
        result = await rig.service.runs.run(ALICE, RunSpec(well, "echo well", timeout=15))
        assert (result.status, result.stdout) == (Status.COMPLETED, b"well\n")
        assert not any(task.done() for task in starting)
    await asyncio.gather(*starting)


async def test_a_place_that_is_held_for_long_is_given_back() -> None:
    turns = Turns(1)
    later = asyncio.get_running_loop().time() + 60
    with await turns.take_briefly(A, 0.05, later):
        async with asyncio.timeout(30):
            await turns.acquire(B)
    with await turns.take_briefly(A, 60, asyncio.get_running_loop().time() + 0.05):
        pass  # without a place, which is B's
    turns.release(B)
    with await turns.take_briefly(A, 60, later):
        waiting = asyncio.create_task(turns.acquire(B))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    await waiting


async def test_a_command_whose_turn_does_not_come_in_time_is_not_started(rig: Rig) -> None:
    session = await rig.create()
    rig.service._foreground.starts = turns = Turns(1)
    await turns.acquire(B)
    result = await rig.service.runs.run(ALICE, RunSpec(session, "touch /workspace/ran", timeout=0.2))
    turns.release(B)
    assert "nothing was run" in result.reason
    await check_nothing_ran(rig, session, result)
    assert await read_events(rig, result.run_id) == ["run_started", "run_ended"]


class SlowAudit:
    """Lets no command's beginning into the log before it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = asyncio.Event()
        record = Audit.record

        async def wait(audit: Audit, event: str, **facts: Any) -> None:
            if event == "run_started":
                await self.go_on.wait()
            await record(audit, event, **facts)

        monkeypatch.setattr(Audit, "record", wait)


async def test_a_command_that_could_not_be_put_on_record_in_time_is_not_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await rig.create()
    slow = SlowAudit(monkeypatch)
    sandbox, _ = await rig.engine.attach(rig.sandbox_of(session))
    starts: list[ExecSpec] = []
    with monkeypatch.context() as watching:
        watching.setattr(sandbox, "start", starts.append)  # it would be ended at once, before there is a trace of it
        result = await rig.service.runs.run(ALICE, RunSpec(session, "touch /workspace/ran", timeout=0.2))
        slow.go_on.set()
        async with asyncio.timeout(30):
            while rig.service._endings._settled:
                await asyncio.sleep(0.02)
    assert starts == []
    await check_nothing_ran(rig, session, result)


async def test_a_background_run_that_could_not_be_put_on_record_in_time_is_not_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await rig.create()
    slow = SlowAudit(monkeypatch)
    with fault(Kind.LOST, "sandbox_unreachable"):
        await rig.service.runs.run(ALICE, RunSpec(session, "touch /workspace/ran", timeout=0.2, background=True))
    slow.go_on.set()
    async with asyncio.timeout(30):
        while not (on_record := await rig.service.runs.list(ALICE, session)) or on_record[0].status is Status.RUNNING:
            await asyncio.sleep(0.02)
    await check_nothing_ran(rig, session, on_record[0])


async def test_a_command_that_turns_out_not_to_start_after_its_time_stays_on_record(rig: Rig) -> None:
    session = await rig.create()
    with stopped(rig, session):
        spec = RunSpec(session, "touch /workspace/ran", timeout=0.2, workdir="/nowhere")
        result = await rig.service.runs.run(ALICE, spec)
    assert "whether it began is not known" in result.reason
    await check_nothing_ran(rig, session, result)


async def test_nothing_is_kept_of_a_command_for_which_there_was_no_way_in(rig: Rig) -> None:
    session = await rig.create()
    link, _ = await rig.engine.attach(rig.sandbox_of(session))
    with stopped(rig, session):
        await link.close()
        rig.engine._links.clear()
        result = await rig.service.runs.run(ALICE, RunSpec(session, "touch /workspace/ran", timeout=0.2))
    assert "nothing was run" in result.reason
    await check_nothing_ran(rig, session, result)
