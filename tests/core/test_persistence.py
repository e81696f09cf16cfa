"""Sessions that are stopped and started: one at a time, from every state, with what belongs to them."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import ApprovalStatus, ChildSpec, HostsChange, Phase, RunSpec, SessionSpec, Status
from k8e.engine import EngineError, Limits
from k8e.settings import PoolSettings, QuotasSettings, Settings
from tests.core.bare_engine import BareEngine
from tests.core.rig import ALICE, BOB, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root

LASTING = SessionSpec(session_id="one", persistent=True, env={"WORD": "kept"}, labels={"profile": "moderate"})


def edit(folder: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(folder / "state.db", isolation_level=None)
    connection.execute(statement, values)
    connection.close()


async def phase_of(rig: Rig, session: str = "one") -> Phase:
    return (await rig.service.sessions.get(ALICE, session)).phase


async def test_files_and_configuration_come_back(rig: Rig) -> None:
    spec = replace(LASTING, allowed_hosts=["a.test"])
    before = await rig.service.sessions.create(ALICE, spec)
    await rig.run("one", "echo kept > file")
    await rig.service.sessions.set_hosts(ALICE, "one", HostsChange(add=["b.test"]))
    stopped = await rig.service.sessions.stop(ALICE, "one")
    assert (stopped.phase, stopped.labels) == (Phase.STOPPED, {"profile": "moderate"})
    assert rig.engine.processes(rig.sandbox_of("one")) == []
    assert [each.phase for each in await rig.service.sessions.list(ALICE)] == [Phase.STOPPED]
    again = await rig.service.sessions.start(ALICE, "one")
    assert (again.phase, again.env_keys, again.created, again.labels) == (
        *(Phase.ACTIVE, ("WORD",)),
        *(before.created, {"profile": "moderate"}),
    )
    assert rig.engine.egress(rig.sandbox_of("one")) == ("a.test", "b.test")
    result = await rig.run("one", "cat file; echo $WORD")
    assert result.stdout == b"kept\nkept\n"
    await rig.service.sessions.destroy(ALICE, "one")
    await rig.assert_no_trace()
    assert os.listdir(rig.folder / "environments") == []
    await rig.service.close()
    events = [line["event"] for line in rig.read_audit() if line["event"].startswith("session_")]
    assert events == ["session_created", "session_stopped", "session_started", "session_ended"]


async def test_what_is_not_meant_to_last_cannot_be_stopped(rig: Rig) -> None:
    await rig.create(spec=SessionSpec(session_id="one"))
    for call in (rig.service.sessions.stop, rig.service.sessions.start):
        with fault(Kind.CONFLICT, "session_not_persistent"):
            await call(ALICE, "one")
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await call(BOB, "one")
    assert (await rig.run("one", "echo well")).stdout == b"well\n"


async def test_a_stopped_session_says_how_to_start_it(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    await rig.service.sessions.stop(ALICE, "one")
    for attempt in (
        rig.run("one", "true"),
        rig.service.files.read(ALICE, "one", "file"),
        rig.service.sessions.set_hosts(ALICE, "one", HostsChange(hosts=[])),
        rig.service.approvals.ask(ALICE, "one", "may I?"),
        rig.service.runs.commands(ALICE, "one"),
    ):
        with pytest.raises(Fault) as caught:
            await attempt
        told = caught.value
        assert (told.kind, told.code, told.detail) == (Kind.CONFLICT, "session_stopped", "it was stopped")
        assert "k8e sandbox start one" in told.hint


async def test_one_stops_it_and_one_starts_it_and_all_are_told(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    for call, phase in (("stop", Phase.STOPPED), ("start", Phase.ACTIVE)) * 2:
        answers = await asyncio.gather(*(getattr(rig.service.sessions, call)(ALICE, "one") for _ in range(5)))
        assert {answer.phase for answer in answers} == {phase}
    await rig.service.close()
    events = [line["event"] for line in rig.read_audit() if line["event"].startswith("session_st")]
    assert events == ["session_stopped", "session_started"] * 2


async def test_stop_and_start_at_once_come_one_after_the_other(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    await asyncio.gather(rig.service.sessions.stop(ALICE, "one"), rig.service.sessions.start(ALICE, "one"))
    assert await phase_of(rig) is Phase.ACTIVE
    assert (await rig.run("one", "echo well")).stdout == b"well\n"


async def test_a_caller_that_leaves_changes_nothing(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    for call, end in (("stop", Phase.STOPPED), ("start", Phase.ACTIVE)):
        task = asyncio.create_task(getattr(rig.service.sessions, call)(ALICE, "one"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        while await phase_of(rig) is not end:
            await asyncio.sleep(0.005)


# What is under way


async def test_what_runs_is_asked_to_end_and_its_caller_told_why(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    polite = await rig.service.runs.start(
        ALICE, RunSpec("one", "trap 'echo bye; exit 3' TERM; echo hi; read || sleep 60 & wait")
    )
    output = polite.output()
    assert (await anext(output)).data == b"hi\n"
    code = "trap 'echo saved > saved; exit 0' TERM; echo up; sleep 60 & wait"
    background = await rig.start_background("one", code)
    while (await rig.service.runs.poll(ALICE, background)).stdout_bytes == 0:
        await asyncio.sleep(0.005)
    await rig.service.sessions.stop(ALICE, "one")
    assert b"".join([chunk.data async for chunk in output]) == b"bye\n"
    result = await polite.result()
    assert (result.status, result.exit_code, result.reason) == (Status.KILLED, 3, "it was stopped")
    ended = await rig.service.runs.poll(ALICE, background)
    assert (ended.status, ended.exit_code, ended.stdout_bytes, ended.truncated) == (Status.KILLED, 0, 3, True)
    await rig.service.sessions.start(ALICE, "one")
    assert (await rig.run("one", "cat saved")).stdout == b"saved\n"
    assert (await rig.service.runs.poll(ALICE, background)).status is Status.KILLED
    assert {run.status for run in await rig.service.runs.list(ALICE, "one")} == {Status.KILLED, Status.COMPLETED}


async def test_what_does_not_want_to_end_is_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.sessions.persistence.PATIENCE", 0.05)
    await rig.create(spec=LASTING)
    stubborn = asyncio.create_task(rig.run("one", "trap '' TERM; while :; do sleep 1; done"))
    background = await rig.start_background("one", "trap '' TERM; while :; do sleep 1; done")
    while len(await rig.service.runs.commands(ALICE, "one")) < 2:
        await asyncio.sleep(0.005)
    await rig.service.sessions.stop(ALICE, "one")
    with fault(Kind.LOST, "session_stopped"):
        await stubborn
    assert (await rig.service.runs.poll(ALICE, background)).status is Status.LOST
    assert rig.engine.processes(rig.sandbox_of("one")) == []


async def test_questions_are_withdrawn_and_stay_so(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    asked = await rig.service.approvals.ask(ALICE, "one", "delete everything")
    await rig.service.sessions.stop(ALICE, "one")
    await rig.service.sessions.start(ALICE, "one")
    assert (await rig.service.approvals.get(ALICE, asked.approval_id)).status is ApprovalStatus.WITHDRAWN


async def test_its_children_end_with_it(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    child = (await rig.service.sessions.create_child(ALICE, "one", ChildSpec())).session_id
    await rig.run(child, "echo shared > file")
    await rig.service.sessions.stop(ALICE, "one")
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.run(child, "true")
    with fault(Kind.CONFLICT, "session_stopped"):
        await rig.service.sessions.create_child(ALICE, "one", ChildSpec())
    started = await rig.service.sessions.start(ALICE, "one")
    assert started.children == ()
    assert (await rig.run("one", "cat file")).stdout == b"shared\n"


async def test_destroyed_while_it_stops_or_starts(rig: Rig) -> None:
    for call, turns in (("stop", 0), ("stop", 3), ("start", 0), ("start", 20)):
        await rig.create(spec=LASTING)
        if call == "start":
            await rig.service.sessions.stop(ALICE, "one")
        moving = asyncio.create_task(getattr(rig.service.sessions, call)(ALICE, "one"))
        for _ in range(turns + 1):
            await asyncio.sleep(0.001)
        await rig.service.sessions.destroy(ALICE, "one")
        await asyncio.wait({moving})
        told = moving.exception()
        assert told is None or (isinstance(told, Fault) and told.kind is Kind.CONFLICT), told
        await rig.assert_no_trace()


# Its environment


async def test_plain_variables_are_kept_for_root_alone_and_secrets_nowhere(rig: Rig) -> None:
    spec = replace(LASTING, secrets={"TOKEN": "s3cr3t-value"})
    session = await rig.service.sessions.create(ALICE, spec)
    assert (session.env_keys, session.secret_keys) == (("TOKEN", "WORD"), ("TOKEN",))
    assert (await rig.run("one", "echo $WORD $TOKEN")).stdout == b"kept s3cr3t-value\n"
    folder = rig.folder / "environments"
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    await rig.service.sessions.stop(ALICE, "one")
    for path in rig.folder.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-value" not in path.read_bytes(), path
    with fault(Kind.INVALID, "secrets_missing", "secrets"):
        await rig.service.sessions.start(ALICE, "one")
    assert await phase_of(rig) is Phase.STOPPED
    given = {"TOKEN": "another"}
    await rig.service.sessions.start(ALICE, "one", env={"WORD": "new", "MORE": "x"}, secrets=given)
    assert (await rig.run("one", "echo $WORD $MORE $TOKEN")).stdout == b"new x another\n"
    with fault(Kind.CONFLICT, "session_active"):
        await rig.service.sessions.start(ALICE, "one", env={"WORD": "newer"})
    await rig.service.sessions.stop(ALICE, "one")
    await rig.service.sessions.start(ALICE, "one", secrets=given)
    assert (await rig.run("one", "echo $WORD $MORE $TOKEN")).stdout == b"new x another\n"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SessionSpec(labels={"a b": ""}), "labels"),
        (SessionSpec(labels={"a": "line\nbreak"}), "labels.a"),
        (SessionSpec(labels={f"l{n}": "" for n in range(33)}), "labels"),
        (SessionSpec(labels={"a": "x" * (16 << 10)}), "labels"),
        (SessionSpec(secrets={"9": "x"}), "secrets"),
        (SessionSpec(env={"A": "1"}, secrets={"A": "1"}), "secrets"),
        (SessionSpec(env={"A": "x" * 20_000}, secrets={"B": "x" * 20_000}), "env"),
    ],
)
async def test_what_cannot_be_meant_is_refused(rig: Rig, spec: SessionSpec, field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        await rig.service.sessions.create(ALICE, spec)


# Limits


async def test_it_does_not_expire(folder: Path, clock: ManualClock) -> None:
    async with open_rig(folder, clock) as rig:
        await rig.create(spec=replace(LASTING, ttl=5))
        await rig.create(spec=SessionSpec(session_id="other", ttl=5))
        clock.advance(10)
        assert await rig.service.expire() == ["other"]
        await rig.service.sessions.stop(ALICE, "one")
        clock.advance(10)
        assert await rig.service.expire() == []
        await rig.service.sessions.start(ALICE, "one")


async def test_stopped_it_takes_disk_and_nothing_else(folder: Path) -> None:
    limits = Limits(cpus=1.0, memory=512 << 20, disk=1 << 30)
    quotas = QuotasSettings(cpus=1.5, memory=768 << 20, disk=(2 << 30) + 1)
    async with open_rig(folder, settings=Settings(quotas=quotas)) as rig:
        await rig.create(spec=replace(LASTING, limits=limits))
        with fault(Kind.EXHAUSTED, "too_many_cpus"):
            await rig.create(spec=SessionSpec(limits=limits))
        await rig.service.sessions.stop(ALICE, "one")
        other = await rig.create(spec=SessionSpec(limits=limits))
        with fault(Kind.EXHAUSTED, "too_many_cpus"):
            await rig.service.sessions.start(ALICE, "one")
        assert await phase_of(rig) is Phase.STOPPED
        with fault(Kind.EXHAUSTED, "too_much_disk"):
            await rig.create(spec=SessionSpec(limits=replace(limits, cpus=0.1, memory=16 << 20)))
        await rig.service.sessions.destroy(ALICE, other)
        await rig.service.sessions.start(ALICE, "one")


async def test_it_may_be_one_that_was_made_ahead(folder: Path) -> None:
    async with open_rig(folder, pool=PoolSettings(min=1, max=1)) as rig:
        await rig.create()
        await rig.service._pool.settle()
        await rig.create(spec=LASTING)
        assert rig.service.metrics.claims.get("warm") == 1
        await rig.run("one", "echo kept > file")
        await rig.service.sessions.stop(ALICE, "one")
        await rig.service.sessions.start(ALICE, "one")
        assert (await rig.run("one", "cat file; echo $WORD")).stdout == b"kept\nkept\n"


# Trouble


async def test_one_that_dies_is_stopped_and_not_lost(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    await rig.run("one", "echo kept > file")
    running = asyncio.create_task(rig.run("one", "sleep 1000"))
    background = await rig.start_background("one", "sleep 1000")
    while len(await rig.service.runs.commands(ALICE, "one")) < 2:
        await asyncio.sleep(0.005)
    rig.engine.kill_sandbox(rig.sandbox_of("one"))
    with fault(Kind.LOST, "session_stopped"):
        await running
    while await phase_of(rig) is not Phase.STOPPED:
        await asyncio.sleep(0.005)
    with pytest.raises(Fault) as caught:
        await rig.run("one", "true")
    assert caught.value.detail == "its sandbox ended by itself"
    assert (await rig.service.runs.poll(ALICE, background)).status is Status.LOST
    await rig.service.sessions.start(ALICE, "one")
    assert (await rig.run("one", "cat file")).stdout == b"kept\n"


async def test_a_stop_that_fails_is_tried_again(rig: Rig) -> None:
    await rig.create(spec=LASTING)
    rig.engine.stop_failure = EngineError("disk", "is still in use")
    with fault(Kind.FAILED, "sandbox_failed"):
        await rig.service.sessions.stop(ALICE, "one")
    with fault(Kind.CONFLICT, "session_stopping"):
        await rig.run("one", "true")
    rig.engine.stop_failure = None
    await rig.service.look_after()
    while await phase_of(rig) is not Phase.STOPPED:
        await asyncio.sleep(0.005)
    await rig.service.sessions.start(ALICE, "one")


async def test_a_start_that_fails_leaves_it_stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.create(spec=LASTING)
    await rig.run("one", "echo kept > file")
    await rig.service.sessions.stop(ALICE, "one")
    real = rig.engine.start

    async def fail(*_: object) -> None:
        raise EngineError("runtime", "is not there")

    monkeypatch.setattr(rig.engine, "start", fail)
    with fault(Kind.FAILED, "sandbox_failed"):
        await rig.service.sessions.start(ALICE, "one")
    assert await phase_of(rig) is Phase.STOPPED
    monkeypatch.setattr(rig.engine, "start", real)
    await rig.service.sessions.start(ALICE, "one")
    assert (await rig.run("one", "cat file")).stdout == b"kept\n"


# The next daemon


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.STOPPED, Phase.STARTING])
@pytest.mark.parametrize("alive", [True, False])
async def test_every_half_state_becomes_stopped(folder: Path, phase: Phase, alive: bool) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=LASTING)
        await rig.run("one", "echo kept > file")
        sandbox = rig.sandbox_of("one")
        if phase is Phase.STOPPED or not alive:
            await rig.service.sessions.stop(ALICE, "one")
    edit(folder, "UPDATE sessions SET phase = ?", phase.value)
    async with open_rig(folder) as rig:
        assert await phase_of(rig) is Phase.STOPPED
        assert rig.engine.processes(sandbox) == []
        await rig.service.sessions.start(ALICE, "one")
        assert (await rig.run("one", "cat file; echo $WORD")).stdout == b"kept\nkept\n"


async def test_after_a_reboot_what_lasts_is_stopped_and_the_rest_is_lost(folder: Path) -> None:
    async with open_rig(folder, ManualClock("first boot")) as rig:
        await rig.create(spec=LASTING)
        await rig.create(spec=SessionSpec(session_id="other"))
        await rig.run("one", "echo kept > file")
        background = await rig.start_background("one", "sleep 1000")
    engine = BareEngine(folder / "sandboxes")
    for sandbox in await engine.list():
        engine.kill_sandbox(sandbox)
        while engine.processes(sandbox):
            await asyncio.sleep(0.005)
    later = ManualClock("second boot")
    later.now = 3.0
    async with open_rig(folder, later) as rig:
        assert await phase_of(rig) is Phase.STOPPED
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.sessions.get(ALICE, "other")
        assert (await rig.service.runs.poll(ALICE, background)).status is Status.LOST
        await rig.service.sessions.start(ALICE, "one")
        assert (await rig.run("one", "cat file; echo $WORD")).stdout == b"kept\nkept\n"


async def test_whose_files_are_gone_is_lost(folder: Path) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=LASTING)
        await rig.service.sessions.stop(ALICE, "one")
        sandbox = rig.sandbox_of("one")
    await BareEngine(folder / "sandboxes").destroy(sandbox)
    async with open_rig(folder) as rig:
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.sessions.get(ALICE, "one")
        assert os.listdir(folder / "environments") == []


async def test_whether_it_is_emulated_is_found_out_at_each_start(rig: Rig) -> None:
    plain = rig.engine.reports
    rig.engine.reports = [replace(report, emulated=report.available) for report in plain]
    assert (await rig.service.sessions.create(ALICE, LASTING)).emulated
    before = await rig.run("one", "true")
    await rig.service.sessions.stop(ALICE, "one")
    rig.engine.reports = plain
    assert not (await rig.service.sessions.start(ALICE, "one")).emulated
    after = await rig.run("one", "true")
    assert {run.run_id: run.emulated for run in await rig.service.runs.list(ALICE, "one")} == {
        before.run_id: True,
        after.run_id: False,
    }
    (kept,) = await rig.store.sessions()
    assert not kept.session.emulated
