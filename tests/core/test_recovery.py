"""What the next daemon makes of what the last one left. Here the last one leaves orderly, or leaves a record as a crash
would have left it; test_crashes.py kills it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import Phase, RunSpec, SessionSpec, Status
from k8e.engine import Runtime, SandboxSpec
from tests.core.bare_engine import BareEngine
from tests.core.rig import ALICE, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


def edit(folder: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(folder / "state.db", isolation_level=None)
    connection.execute(statement, values)
    connection.close()


async def test_sessions_outlive_the_daemon(folder: Path) -> None:
    async with open_rig(folder) as rig:
        spec = SessionSpec(session_id="one", tenant="team", env={"TOKEN": "a=b\nc", "EMPTY": ""}, ttl=77)
        before = await rig.service.sessions.create(ALICE, spec)
        await rig.run("one", "echo kept > file")
    async with open_rig(folder) as rig:
        after = await rig.service.sessions.get(ALICE, "one")
        assert (after.tenant, after.ttl, after.env_keys, after.created) == (
            "team",
            77,
            ("EMPTY", "TOKEN"),
            before.created,
        )
        result = await rig.run("one", 'cat file; echo "$TOKEN"; env | grep -c ^EMPTY=$')
        assert result.stdout == b"kept\na=b\nc\n1\n"
        assert len(await rig.service.runs.list(ALICE, "one")) == 2
        await rig.service.sessions.destroy(ALICE, "one")
        await rig.assert_no_trace()


@pytest.mark.parametrize("phase", [Phase.CREATING, Phase.DESTROYING])
async def test_what_was_half_done_is_undone_or_finished(folder: Path, phase: Phase) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=SessionSpec(session_id="one"))
    edit(folder, "UPDATE sessions SET phase = ?", phase.value)
    async with open_rig(folder) as rig:
        await rig.assert_no_trace()
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.sessions.get(ALICE, "one")
        remembered = [session.phase for session in await rig.service.sessions.list(ALICE, all_phases=True)]
        assert remembered == ([] if phase is Phase.CREATING else [Phase.DESTROYED])
        await rig.create(spec=SessionSpec(session_id="one"))


async def test_a_session_whose_sandbox_is_gone_is_known_as_lost(folder: Path) -> None:
    async with open_rig(folder) as rig:
        gone = await rig.create(spec=SessionSpec(session_id="gone"))
        dead = await rig.create(spec=SessionSpec(session_id="dead"))
        run_id = await rig.start_background(gone, "sleep 1000")
        sandboxes = {name: rig.sandbox_of(name) for name in (gone, dead)}
    engine = BareEngine(folder / "sandboxes")
    await engine.destroy(sandboxes[gone])
    engine.kill_sandbox(sandboxes[dead])
    while engine.processes(sandboxes[dead]):
        await asyncio.sleep(0.005)
    async with open_rig(folder) as rig:
        for name in (gone, dead):
            with pytest.raises(Fault) as caught:
                await rig.run(name, "true")
            assert (caught.value.kind, caught.value.detail) == (Kind.NOT_FOUND, "its sandbox ended by itself")
        assert (await rig.service.runs.poll(ALICE, run_id)).status is Status.LOST
        await rig.assert_no_trace()


async def test_a_sandbox_of_no_session_is_removed(folder: Path) -> None:
    engine = BareEngine(folder / "sandboxes")
    await engine.create("orphan", SandboxSpec(Runtime.NATIVE))
    await engine.close()
    async with open_rig(folder) as rig:
        await rig.assert_no_trace()


async def test_an_environment_that_is_gone_is_not_replaced_by_an_empty_one(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(env={"TOKEN": "x"}))
        link, _ = await rig.engine.attach(rig.sandbox_of(session))
        await link.remove(b"/run/k8e-session/env")
    async with open_rig(folder) as rig:
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.run(session, "true")
        await rig.assert_no_trace()


async def test_commands_of_a_dead_daemon_are_matched_with_their_records(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
        sandbox = rig.sandbox_of(session)
        forgotten = await rig.start_background(session, "sleep 1001")
        background = await rig.start_background(session, "sleep 1002")
        foreground = await rig.start_background(session, "setsid sleep 1003 & sleep 1004")
        ended = await rig.start_background(session, "sleep 0.01; echo gone; exit 6")
        unstarted = await rig.start_background(session, "sleep 1005")
        link, _ = await rig.engine.attach(sandbox)
        while sum(command.running for command in await link.commands()) != 4:
            await asyncio.sleep(0.005)
    # As a crash would have left them.
    edit(folder, "DELETE FROM runs WHERE run_id = ?", forgotten)
    edit(folder, "UPDATE runs SET background = 0 WHERE run_id IN (?, ?)", foreground, ended)
    edit(folder, "UPDATE runs SET command = NULL WHERE run_id = ?", unstarted)
    async with open_rig(folder) as rig:
        assert [command.name for command in await rig.service.runs.commands(ALICE, session)] == [b"bash"]
        runs = await rig.service.runs.list(ALICE, session)
        assert {run.run_id: (run.status, run.exit_code, run.truncated) for run in runs} == {
            background: (Status.RUNNING, None, False),
            foreground: (Status.KILLED, 143, False),
            ended: (Status.COMPLETED, 6, True),
            unstarted: (Status.LOST, None, False),
        }
        assert [run.run_id for run in runs if run.duration_ms] == [foreground, ended]
        await rig.service.runs.kill(ALICE, background)
        link, _ = await rig.engine.attach(sandbox)
        assert await link.commands() == []
        await rig.wait_until_alone(session)


async def test_commands_that_take_long_to_end_cost_their_session_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.core.recovery._PATIENCE", 5.0)  # one after the other they would take longer
    async with open_rig(folder) as rig:
        session = await rig.create()
        await rig.run(session, "echo kept > file")
        stubborn = [
            await rig.start_background(session, f"trap '' TERM; touch {n}; while :; do sleep 1; done") for n in range(5)
        ]
        while (await rig.run(session, "ls [0-4] | wc -l")).stdout != b"5\n":
            await asyncio.sleep(0.01)
    edit(folder, "UPDATE runs SET background = 0")
    async with open_rig(folder) as rig:
        assert (await rig.run(session, "cat file")).stdout == b"kept\n"
        found = {run.run_id: run.status for run in await rig.service.runs.list(ALICE, session)}
        assert [found[run] for run in stubborn] == [Status.KILLED] * 5


async def test_output_that_is_collected_late_costs_its_session_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
        run = await rig.start_background(session, "echo output")
    with monkeypatch.context() as patch:
        patch.setattr("k8e.core.runs.background._ANSWER", 0.0)
        async with open_rig(folder) as rig:
            assert (await rig.run(session, "echo well")).stdout == b"well\n"
    async with open_rig(folder) as rig:
        assert (await rig.poll_to_the_end(run)).stdout == b"output\n"


async def test_recovering_is_harmless_when_there_is_nothing_to_do(folder: Path) -> None:
    for _ in range(2):
        async with open_rig(folder) as rig:
            assert await rig.service.sessions.list(ALICE, all_phases=True) == []


async def test_closing_ends_what_a_caller_waits_for_and_nothing_else(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
        run = await rig.service.runs.start(ALICE, RunSpec(session, "sleep 1000"))
        background = await rig.start_background(session, "sleep 1000")
    assert (await run.result()).status is Status.KILLED
    async with open_rig(folder) as rig:
        assert (await rig.service.runs.poll(ALICE, background)).status is Status.RUNNING
        assert len(await rig.service.runs.commands(ALICE, session)) == 1
