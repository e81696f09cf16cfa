"""A sandbox that does not answer: its agent is stopped, as one is that gets no CPU or was frozen. Callers have
their answer within the timeout and a second, and the session goes on or is ended with that reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from k8e.core.contract import LiveRun
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, RunResult, RunSpec, SessionSpec, Status, Terminal
from k8e.core.runs.launcher import place_run
from k8e.engine import EngineError
from k8e.link.client import AgentLink
from k8e.link.errors import AgentError, Code
from k8e.link.model import ExecSpec
from tests.core.bare_engine import BareEngine
from tests.core.rig import ALICE, BOB, ROOT, Rig, fault, open_rig

PROMISED: Final = 1.0  # seconds beyond the timeout
# For a machine on which a dozen other tests run: what is promised holds of the service, not of its scheduler.
BUSY: Final = 1.5


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    """By the machine's own clock."""
    async with open_rig(folder) as rig:
        yield rig


def stopped(rig: Rig, session: str) -> contextlib.AbstractContextManager[None]:
    """The agent does nothing meanwhile."""
    return stop_processes(rig.engine.processes(rig.sandbox_of(session)))


@contextlib.contextmanager
def stop_processes(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # one that was just becoming something else
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def in_time(timeout: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < timeout + PROMISED + BUSY


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent sandbox is ended after a second and not after thirty."""
    monkeypatch.setattr("k8e.core.sessions.ends.SILENCE", 1.0)


async def wait_for_end(rig: Rig, session: str, caller: Caller = ALICE) -> Fault:
    async with asyncio.timeout(60):
        while True:
            try:
                await rig.service.sessions.get(caller, session)
            except Fault as gone:
                if gone.code == "session_not_found":
                    return gone
            await asyncio.sleep(0.02)


async def read_audit(rig: Rig, event: str) -> list[dict[str, Any]]:
    """No caller waits for these lines: they are written a moment later."""
    async with asyncio.timeout(60):
        while not (found := [each for each in rig.read_audit() if each["event"] == event]):
            await asyncio.sleep(0.02)
    return found


def check_timed_out(result: RunResult, timeout: float) -> None:
    assert (result.status, result.exit_code) == (Status.TIMED_OUT, 124)
    assert "did not answer in time" in result.reason
    check_duration(result, timeout)


def check_duration(result: RunResult, timeout: float) -> None:
    """As promised, by the daemon's own measure, but for what its loop came too late, and as much again to listen."""
    assert result.duration_ms <= 1000 * (timeout + PROMISED + 2 * LATENESS.seconds)


class Lateness:
    """How much too late timers of the loop come, of one test in all."""

    seconds = 0.0

    async def measure(self) -> None:
        self.seconds, loop = 0.0, asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.02
            await asyncio.sleep(0.02)
            self.seconds += loop.time() - due


LATENESS: Final = Lateness()


@pytest.fixture(autouse=True)
async def _lateness() -> AsyncIterator[None]:
    measuring = asyncio.create_task(LATENESS.measure())
    yield
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)


def stand_still(seconds: float) -> None:
    """The daemon does nothing at all meanwhile, as one that is stopped, or whose machine is."""
    time.sleep(seconds)


async def test_a_command_that_runs_when_the_sandbox_falls_silent_is_answered_in_time(rig: Rig) -> None:
    session = await rig.create()
    with in_time(1):
        run = asyncio.create_task(rig.service.runs.run(ALICE, RunSpec(session, "echo so far; sleep 60", timeout=1)))
        while await rig.processes_inside(session) == []:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # until its output has come, which only time can tell
        with stopped(rig, session):
            result = await run
    check_timed_out(result, 1)
    assert result.stdout == b"so far\n"
    assert "how it ended is not known" in result.reason
    # It answers again: what ran was ended, and the session goes on.
    assert (await rig.run(session, "echo well")).stdout == b"well\n"
    await rig.wait_until_alone(session)
    (on_record, _) = await rig.service.runs.list(ALICE, session)
    assert (on_record.run_id, on_record.status) == (result.run_id, Status.TIMED_OUT)
    ends = [event for event in await read_audit(rig, "run_ended") if event["run"] == result.run_id]
    assert [event["status"] for event in ends] == ["timed_out"]


async def test_a_command_for_a_silent_sandbox_is_answered_in_time_and_runs_nowhere_later(rig: Rig) -> None:
    session = await rig.create()
    with stopped(rig, session), in_time(0.5):
        check_timed_out(await rig.service.runs.run(ALICE, RunSpec(session, "sleep 60", timeout=0.5)), 0.5)
    await rig.wait_until_alone(session)
    assert (await rig.run(session, "echo well")).stdout == b"well\n"


@pytest.mark.parametrize("terminal", [None, Terminal()], ids=["plain", "terminal"])
async def test_a_live_run_ends_in_time(rig: Rig, terminal: Terminal | None) -> None:
    session = await rig.create()
    run: LiveRun = await rig.service.runs.start(ALICE, RunSpec(session, "sleep 60", timeout=0.5, terminal=terminal))
    with stopped(rig, session), in_time(0.5):
        assert [chunk async for chunk in run.output()] == []
        check_timed_out(await run.result(), 0.5)
    with stopped(rig, session), in_time(0.5):
        late = await rig.service.runs.start(ALICE, RunSpec(session, "sleep 60", timeout=0.5, terminal=terminal))
        await late.write_stdin(b"x")
        await late.resize(10, 10)
        await late.signal(signal.SIGINT)
        await late.close_stdin()
        assert [chunk async for chunk in late.output()] == []
        check_timed_out(await late.result(), 0.5)
        await late.kill()
    assert (await rig.run(session, "echo well")).stdout == b"well\n"


async def test_a_slow_reader_loses_nothing_to_the_deadline(rig: Rig) -> None:
    session = await rig.create()
    spec = RunSpec(session, "head -c 3000000 /dev/zero; sleep 60", timeout=0.5)
    run = await rig.service.runs.start(ALICE, spec)
    await asyncio.sleep(3)  # longer than the timeout and what is allowed beyond it
    size = 0
    async for chunk in run.output():
        size += len(chunk.data)
    result = await run.result()
    assert (result.status, result.reason, size) == (Status.TIMED_OUT, "", result.stdout_bytes)


async def test_a_sandbox_that_keeps_talking_does_not_put_off_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def place_for_ever(*args: Any) -> ExecSpec:
        return replace(await place_run(*args), timeout=60)  # of which the agent does not end the command at its timeout

    monkeypatch.setattr("k8e.core.runs.launcher.place_run", place_for_ever)
    session = await rig.create()
    run = await rig.service.runs.start(ALICE, RunSpec(session, "yes", timeout=0.5))
    async with asyncio.timeout(30):
        async for _ in run.output():
            await asyncio.sleep(0.01)  # there is more before it comes back
        result = await run.result()
    assert result.status is Status.TIMED_OUT
    await rig.wait_until_alone(session)


async def test_a_command_that_ended_while_the_daemon_stood_still_did_not_time_out(rig: Rig) -> None:
    session = await rig.create()
    run = asyncio.create_task(
        rig.service.runs.run(ALICE, RunSpec(session, "sleep 0.5; head -c 250000 /dev/zero", timeout=1.5))
    )
    while await rig.processes_inside(session) == []:
        await asyncio.sleep(0.01)
    stand_still(3)
    result = await run
    assert (result.status, len(result.stdout), result.reason) == (Status.COMPLETED, 250_000, "")


@pytest.mark.usefixtures("impatient")
async def test_a_sandbox_that_answered_while_the_daemon_stood_still_goes_on(rig: Rig) -> None:
    session = await rig.create()
    with stopped(rig, session):
        check_timed_out(await rig.service.runs.run(ALICE, RunSpec(session, "true", timeout=0.2)), 0.2)
        await asyncio.sleep(0.1)  # it is asked
    stand_still(2)
    (asking,) = rig.service._sessions._doubted.values()
    await asyncio.wait({asking}, timeout=30)
    assert (await rig.run(session, "echo well")).stdout == b"well\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "error", [AgentError(Code.TOO_MANY), EngineError("record", "too many open files")], ids=["agent", "engine"]
)
async def test_a_refusal_and_what_the_engine_fails_at_are_no_silence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    session = await rig.create()
    (live,) = rig.service._registry

    async def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as failing:
        owner, method = (AgentLink, "commands") if isinstance(error, AgentError) else (BareEngine, "attach")
        failing.setattr(owner, method, fail)
        rig.service._sessions.doubt(live)
        (asking,) = rig.service._sessions._doubted.values()
        await asyncio.wait({asking}, timeout=30)
    assert (await rig.run(session, "echo well")).stdout == b"well\n"


@pytest.mark.usefixtures("impatient")
async def test_a_sandbox_that_stays_silent_is_ended_with_that_reason(rig: Rig) -> None:
    spec = SessionSpec(tenant="web")
    session = await rig.create(spec=spec)
    with stopped(rig, session):
        check_timed_out(await rig.service.runs.run(ALICE, RunSpec(session, "true", timeout=0.2)), 0.2)
        gone = await wait_for_end(rig, session)
    assert "did not answer for" in gone.detail
    assert "is gone" in gone.hint
    assert rig.engine.processes(session) == []
    # Root and the owner are told, strangers are not told that there ever was one.
    with pytest.raises(Fault) as root:
        await rig.service.sessions.get(ROOT, session)
    assert root.value.detail == gone.detail
    with pytest.raises(Fault) as stranger:
        await rig.service.sessions.get(BOB, session)
    assert (stranger.value.code, stranger.value.detail) == ("session_not_found", "")
    assert [event["reason"] for event in await read_audit(rig, "session_ended")] == ["unresponsive"]


@pytest.mark.usefixtures("impatient")
async def test_a_lasting_session_whose_sandbox_stays_silent_is_stopped_and_keeps_its_files(rig: Rig) -> None:
    session = await rig.create(spec=SessionSpec(persistent=True))
    await rig.run(session, "echo kept > file")
    with stopped(rig, session):
        check_timed_out(await rig.service.runs.run(ALICE, RunSpec(session, "true", timeout=0.2)), 0.2)
        async with asyncio.timeout(60):
            while (await rig.service.sessions.get(ALICE, session)).phase.value != "stopped":
                await asyncio.sleep(0.02)
    with pytest.raises(Fault) as refused:
        await rig.run(session, "true")
    assert (refused.value.code, "did not answer for" in refused.value.detail) == ("session_stopped", True)
    await rig.service.sessions.start(ALICE, session)
    assert (await rig.run(session, "cat file")).stdout == b"kept\n"


async def test_background_runs_of_a_silent_sandbox_are_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.runs.background._ANSWER", 0.5)
    session = await rig.create()
    short = await rig.start_background(session, "sleep 60", limit=0.5)
    ended = await rig.start_background(session, "echo all; sleep 0.1")
    assert (await rig.poll_to_the_end(ended)).stdout == b"all\n"
    long = await rig.start_background(session, "echo said; sleep 60", limit=60)
    with stopped(rig, session):
        await asyncio.sleep(1.5)  # beyond the time of the first
        over, running = await rig.service.runs.poll(ALICE, short), await rig.service.runs.poll(ALICE, long)
        # What is told as the end stands: of one whose time is over it is not known how it ended.
        assert (over.status, over.exit_code) == (Status.RUNNING, None)
        assert (running.status, running.exit_code) == (Status.RUNNING, None)
        withheld = await rig.service.runs.poll(ALICE, ended)
        assert (withheld.status, withheld.stdout, withheld.truncated) == (Status.COMPLETED, b"", True)
        assert "did not answer" in over.reason
        assert "did not answer" in running.reason
        with fault(Kind.LOST, "sandbox_unreachable"):
            await rig.service.runs.kill(ALICE, long)
        with fault(Kind.LOST, "sandbox_unreachable"):
            await rig.service.runs.run(ALICE, RunSpec(session, "sleep 60", timeout=0.5, background=True))
        # Nor does it hold up what the service does for other callers.
        with in_time(1):
            await rig.service.look_after()
    assert (await rig.poll_to_the_end(short)).status is Status.TIMED_OUT
    await rig.service.runs.kill(ALICE, long)
    assert (await rig.service.runs.poll(ALICE, long)).stdout == b"said\n"


async def test_files_of_a_silent_sandbox_are_answered(rig: Rig) -> None:
    session = await rig.create()
    link, _ = await rig.engine.attach(rig.sandbox_of(session))
    link._mux.timing = replace(link._mux.timing, reply=0.5, quiet=0.5, pong=0.5, reconnect=0.5)
    with stopped(rig, session):
        for attempt in (
            rig.service.files.write(ALICE, session, "/workspace/f", b"x", append=False),
            rig.service.files.read(ALICE, session, "/workspace/f"),
            rig.service.files.list(ALICE, session),
            rig.service.runs.commands(ALICE, session),
        ):
            with fault(Kind.LOST, "sandbox_unreachable"):
                async with asyncio.timeout(30):
                    await attempt


async def test_a_new_daemon_is_not_held_up_by_a_silent_sandbox(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.recovery._PATIENCE", 5.0)
    async with open_rig(folder) as rig:
        session, well = await rig.create(), await rig.create()
        stopping = stopped(rig, session)
    with stopping, in_time(20):
        async with open_rig(folder) as following:
            assert (await following.run(well, "echo well")).stdout == b"well\n"
            with pytest.raises(Fault) as gone:
                await following.run(session, "true")
    assert "did not answer" in gone.value.detail
