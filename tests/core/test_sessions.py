from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import (
    Caller,
    ManifestDir,
    ManifestEntry,
    ManifestFile,
    ManifestRepo,
    Meant,
    Phase,
    RunSpec,
    SessionSpec,
)
from k8e.engine import EngineError, Limits, Runtime, RuntimeReport, SandboxSpec
from k8e.settings import LimitsSettings, QuotasSettings, Settings
from tests.core.rig import ALICE, BOB, ROOT, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


async def test_a_session_is_created_used_and_destroyed(rig: Rig) -> None:
    session = await rig.service.sessions.create(
        ALICE, SessionSpec(session_id="mine", tenant="team", env={"B": "2", "A": "1"})
    )
    assert (session.session_id, session.tenant, session.owner) == ("mine", "team", 1000)
    assert (session.phase, session.runtime, session.env_keys) == (Phase.ACTIVE, Runtime.NATIVE, ("A", "B"))
    assert await rig.service.sessions.get(ALICE, "mine") == session
    assert (await rig.run("mine", "echo $A$B; pwd; id -u")).stdout == b"12\n/workspace\n20001\n"
    await rig.service.sessions.destroy(ALICE, "mine")
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.get(ALICE, "mine")
    await rig.assert_no_trace()


async def test_an_id_is_chosen_where_none_is_given(rig: Rig) -> None:
    first, second = await rig.create(), await rig.create()
    assert first != second
    assert {session.session_id for session in await rig.service.sessions.list(ALICE)} == {first, second}


# Whose it is


async def test_what_is_not_yours_is_answered_like_what_does_not_exist(rig: Rig) -> None:
    theirs = await rig.create(ALICE, SessionSpec(session_id="theirs"))
    run_id = await rig.start_background(theirs, "sleep 1000")

    async def answers(session: str, run: str) -> list[tuple[str, ...]]:
        service, told = rig.service, []
        for attempt in (
            service.sessions.get(BOB, session),
            service.runs.run(BOB, RunSpec(session, "true")),
            service.runs.run(BOB, RunSpec(session, "true", background=True)),
            service.runs.start(BOB, RunSpec(session, "true")),
            service.runs.commands(BOB, session),
            service.runs.list(BOB, session),
            service.files.write(BOB, session, "a", b"", append=False),
            service.files.read(BOB, session, "a"),
            service.files.list(BOB, session),
            service.runs.poll(BOB, run),
            service.runs.kill(BOB, run),
            service.sessions.destroy(BOB, session),
        ):
            with pytest.raises(Fault) as caught:
                await attempt
            got = caught.value
            words = (got.kind.value, got.code, got.error, got.detail, got.hint, got.field)
            told.append(tuple(word.replace(session, "SESSION").replace(run, "RUN") for word in words))
        return told

    assert await answers(theirs, run_id) == await answers("nobodys", "run-0000000000000000")
    assert await rig.service.sessions.list(BOB, all_phases=True) == []
    assert (await rig.service.sessions.get(ALICE, theirs)).phase is Phase.ACTIVE
    # Not even by taking the name can it be found out.
    assert await rig.create(BOB, SessionSpec(session_id="theirs")) == theirs
    assert (await rig.service.sessions.get(BOB, theirs)).owner == BOB.uid


async def test_a_caller_bound_to_a_tenant_has_that_tenants_sessions_only(rig: Rig) -> None:
    await rig.create(ALICE, SessionSpec(session_id="one", tenant="red"))
    red, blue = Caller(ALICE.uid, "red"), Caller(ALICE.uid, "blue")
    assert (await rig.service.sessions.get(red, "one")).tenant == "red"
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.get(blue, "one")
    with fault(Kind.DENIED, "wrong_tenant", "tenant"):
        await rig.service.sessions.create(blue, SessionSpec(tenant="red"))
    assert (await rig.service.sessions.create(blue, SessionSpec(session_id="one"))).tenant == "blue"
    # Who is bound to none has both, and has to say which.
    with fault(Kind.CONFLICT, "session_ambiguous"):
        await rig.service.sessions.get(ALICE, "one")
    said = replace(ALICE, meant=Meant(tenant="blue"))
    assert (await rig.service.sessions.get(said, "one")).tenant == "blue"
    assert [each.tenant for each in await rig.service.sessions.list(said)] == ["blue"]


async def test_of_namesakes_one_is_meant_by_its_owner(rig: Rig) -> None:
    for who in (ALICE, BOB):
        await rig.create(who, SessionSpec(session_id="one"))
    with pytest.raises(Fault) as ambiguous:
        await rig.service.sessions.get(ROOT, "one")
    assert ambiguous.value.code == "session_ambiguous"
    assert ambiguous.value.detail == f"uid {ALICE.uid}'s in tenant default; uid {BOB.uid}'s in tenant default"
    await rig.service.sessions.destroy(replace(ROOT, meant=Meant(owner=BOB.uid)), "one")
    assert (await rig.service.sessions.get(ROOT, "one")).owner == ALICE.uid
    # It narrows what a caller sees, and never widens it; one's own is not meant when another's is.
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.get(replace(BOB, meant=Meant(owner=ALICE.uid)), "one")
    await rig.create(ROOT, SessionSpec(session_id="one"))
    assert (await rig.service.sessions.get(replace(ROOT, meant=Meant(owner=ALICE.uid)), "one")).owner == ALICE.uid


async def test_root_has_those_of_all_users(rig: Rig) -> None:
    session = await rig.create(ALICE)
    assert (await rig.run(session, "echo hello", ROOT)).stdout == b"hello\n"
    assert [found.session_id for found in await rig.service.sessions.list(ROOT)] == [session]
    await rig.service.sessions.destroy(ROOT, session)


# Who wins


async def test_of_two_creates_with_one_id_exactly_one_wins(rig: Rig) -> None:
    attempts = [rig.service.sessions.create(ALICE, SessionSpec(session_id="one")) for _ in range(5)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    losers = [result for result in results if isinstance(result, Fault)]
    assert {loser.code for loser in losers} == {"session_exists"}
    assert len(losers) == 4
    assert len(await rig.engine.list()) == 1


async def test_of_two_destroys_exactly_one_wins_and_both_say_that_it_is_gone(rig: Rig) -> None:
    session = await rig.create()
    results = await asyncio.gather(
        *(rig.service.sessions.destroy(ALICE, session) for _ in range(3)), return_exceptions=True
    )
    assert [result for result in results if result is None] == [None]
    assert {result.code for result in results if isinstance(result, Fault)} == {"session_not_found"}
    await rig.assert_no_trace()


async def test_a_session_that_is_being_destroyed_cannot_be_used(rig: Rig) -> None:
    session = await rig.create(spec=SessionSpec(session_id="one"))
    destroying = asyncio.create_task(rig.service.sessions.destroy(ALICE, session))
    await asyncio.sleep(0)
    with fault(Kind.CONFLICT, "session_destroying"):
        await rig.run(session, "true")
    with fault(Kind.CONFLICT, "session_exists"):
        await rig.create(spec=SessionSpec(session_id="one"))
    assert (await rig.service.sessions.get(ALICE, session)).phase is Phase.DESTROYING
    await destroying
    assert await rig.create(spec=SessionSpec(session_id="one")) == session


async def test_a_session_that_is_being_created_can_be_destroyed(rig: Rig) -> None:
    creating = asyncio.create_task(rig.service.sessions.create(ALICE, SessionSpec(session_id="one")))
    while not await rig.engine.list():
        await asyncio.sleep(0.001)
    with fault(Kind.CONFLICT, "session_creating"):
        await rig.run("one", "true")
    await rig.service.sessions.destroy(ALICE, "one")
    with fault(Kind.CONFLICT, "session_destroyed"):
        await creating
    await rig.assert_no_trace()
    assert await rig.store.sessions() == []


async def test_who_leaves_while_creating_leaves_nothing(rig: Rig) -> None:
    creating = asyncio.create_task(rig.service.sessions.create(ALICE, SessionSpec()))
    while not await rig.engine.list():
        await asyncio.sleep(0.001)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    while await rig.store.sessions():
        await asyncio.sleep(0.001)
    await rig.assert_no_trace()


async def test_the_number_of_sessions_is_bounded(folder: Path) -> None:
    async with open_rig(folder, settings=Settings(quotas=QuotasSettings(sessions=2))) as rig:
        await rig.create()
        session = await rig.create()
        with fault(Kind.EXHAUSTED, "too_many_sessions"):
            await rig.create()
        await rig.create(BOB)
        await rig.service.sessions.destroy(ALICE, session)
        await rig.create()


async def test_the_settings_say_what_a_session_gets_that_says_nothing(folder: Path) -> None:
    settings = Settings(limits=LimitsSettings(cpus=2.0, memory=1 << 30, ttl=60.0))
    async with open_rig(folder, settings=settings) as rig:
        plain = await rig.service.sessions.create(ALICE, SessionSpec())
        assert (plain.limits, plain.ttl) == (Limits(cpus=2.0, memory=1 << 30), 60.0)
        wished = await rig.service.sessions.create(ALICE, SessionSpec(limits=Limits(), ttl=30.0))
        assert (wished.limits, wished.ttl) == (Limits(), 30.0)


# Runtimes


async def test_a_runtime_that_is_not_there_is_an_error_that_says_what_to_do(rig: Rig) -> None:
    with pytest.raises(Fault) as caught:
        await rig.create(spec=SessionSpec(runtime=Runtime.GVISOR))
    got = caught.value
    assert (got.kind, got.code, got.hint) == (Kind.UNAVAILABLE, "runtime_unavailable", "use native")
    with fault(Kind.UNAVAILABLE, "runtime_unavailable"):
        await rig.create(spec=SessionSpec(runtime=Runtime.KATA))
    rig.engine.reports = (RuntimeReport(Runtime.GVISOR, available=False, reason="no", hint="install runsc"),)
    with fault(Kind.UNAVAILABLE, "no_runtime"):
        await rig.create()
    status = await rig.service.status(ALICE)
    assert (status.available, status.runtime) == (False, None)


async def test_a_sandbox_that_cannot_be_made_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(sandbox: str, spec: SandboxSpec) -> None:
        raise EngineError("seccomp", "not supported", "a newer kernel")

    monkeypatch.setattr(rig.engine, "create", refuse)
    with pytest.raises(Fault) as caught:
        await rig.create(spec=SessionSpec(session_id="one"))
    assert (caught.value.kind, caught.value.code) == (Kind.FAILED, "sandbox_failed")
    assert (caught.value.detail, caught.value.hint) == ("seccomp: not supported", "a newer kernel")
    assert await rig.store.sessions() == []
    monkeypatch.undo()
    await rig.create(spec=SessionSpec(session_id="one"))


async def test_a_sandbox_that_cannot_be_destroyed_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await rig.create()

    async def refuse(sandbox: str) -> None:
        raise EngineError("cgroup", "busy")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "destroy", refuse)
        with fault(Kind.FAILED, "sandbox_failed"):
            await rig.service.sessions.destroy(ALICE, session)
    assert (await rig.service.sessions.get(ALICE, session)).phase is Phase.DESTROYING
    await rig.service.look_after()
    while await rig.service.sessions.list(ALICE, all_phases=True) == [] or await rig.engine.list():
        await asyncio.sleep(0.001)
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.destroy(ALICE, session)


async def test_sessions_that_expire_together_end_a_few_at_a_time(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [await rig.create() for _ in range(9)]
    clock.advance(4000)
    destroy, under_way, most = rig.engine.destroy, 0, 0
    used = ""

    async def watch(sandbox: str) -> None:
        nonlocal under_way, most, used
        under_way += 1
        most = max(most, under_way)
        if not used:  # one whose turn has not come is used meanwhile
            waiting = [live for live in rig.service._registry if live.usable]
            used = waiting[-1].session_id
            waiting[-1].touch()
        await destroy(sandbox)
        under_way -= 1

    monkeypatch.setattr(rig.engine, "destroy", watch)
    assert set(await rig.service.expire()) == set(sessions) - {used}
    assert 1 < most < 9
    assert (await rig.service.sessions.get(ALICE, used)).phase is Phase.ACTIVE


# Manifests


async def test_a_manifest_fills_the_workspace(rig: Rig) -> None:
    entries: list[ManifestEntry] = [
        ManifestFile("deep/down/script", b"#!/bin/sh\necho ran\n", 0o755),
        ManifestDir("empty/dir"),
        ManifestFile("/tmp/outside", b"x"),
    ]
    session = await rig.create(spec=SessionSpec(manifest=entries))
    result = await rig.run(session, "deep/down/script; stat -c '%U %F' empty/dir /tmp/outside")
    assert result.stdout == b"ran\nuser directory\nuser regular file\n"


GIT = """
git init -q -b main /tmp/origin && cd /tmp/origin
git config user.email a@b; git config user.name n; git config uploadpack.allowAnySHA1InWant true
echo one > file; git add .; git commit -qm one; git tag v1
echo two > file; git commit -qam two
"""


async def test_a_repository_is_cloned_from_inside(rig: Rig) -> None:
    # There is no network in these sandboxes: the origin is made in one, and cloned by the steps of another session.
    session = await rig.create()
    assert (await rig.run(session, GIT)).exit_code == 0
    from k8e.core.sandbox.manifest import apply_manifest

    link, place = await rig.engine.attach(rig.sandbox_of(session))
    origin = "file:///tmp/origin"
    await apply_manifest(link, place, (), [ManifestRepo("head", origin), ManifestRepo("old", origin, "v1")])
    commit = (await rig.run(session, "git -C /tmp/origin rev-parse v1")).stdout.decode().strip()
    await apply_manifest(link, place, (), [ManifestRepo("by/commit", origin, commit)])
    result = await rig.run(session, "cat head/file old/file by/commit/file; stat -c %U head/file")
    assert result.stdout == b"two\none\none\nuser\n"


@pytest.mark.parametrize(
    "entry",
    [
        ManifestFile("/usr/no", b""),
        ManifestDir("/proc/no"),
        ManifestFile("first/below", b""),
        ManifestRepo("repo", "file:///nowhere"),
        ManifestRepo("repo", "https://user:hunter2@nowhere.invalid/x"),
    ],
)
async def test_one_entry_that_fails_fails_the_whole_create(rig: Rig, entry: ManifestEntry) -> None:
    with pytest.raises(Fault) as caught:
        await rig.create(spec=SessionSpec(session_id="one", manifest=[ManifestFile("first", b""), entry]))
    got = caught.value
    assert (got.kind, got.code, got.field) == (Kind.FAILED, "manifest_failed", "manifest[1]")
    assert entry.path in got.error
    assert got.detail
    assert "hunter2" not in str(got)
    await rig.assert_no_trace()
    assert await rig.store.sessions() == []


# Time


async def test_a_session_expires_after_its_last_use(rig: Rig, clock: ManualClock) -> None:
    kept, left = await rig.create(spec=SessionSpec(ttl=100)), await rig.create(spec=SessionSpec(ttl=100))
    clock.advance(60)
    await rig.run(kept, "true")
    clock.advance(60)
    assert await rig.service.expire() == [left]
    with pytest.raises(Fault) as caught:
        await rig.run(left, "true")
    assert (caught.value.kind, caught.value.code) == (Kind.NOT_FOUND, "session_not_found")
    assert "expired" in caught.value.detail
    clock.advance(39)
    assert await rig.service.expire() == []
    clock.advance(1)
    assert await rig.service.expire() == [kept]
    await rig.assert_no_trace()


async def test_a_command_that_runs_is_a_use(rig: Rig, clock: ManualClock) -> None:
    session = await rig.create(spec=SessionSpec(ttl=100))
    run = await rig.service.runs.start(ALICE, RunSpec(session, "read line"))
    clock.advance(1000)
    assert await rig.service.expire() == []
    await run.close_stdin()
    assert [chunk async for chunk in run.output()] == []
    await run.result()
    clock.advance(99)
    assert await rig.service.expire() == []
    background = await rig.start_background(session, "mkfifo ff; read line < ff")
    clock.advance(1000)
    assert await rig.service.expire() == []
    await rig.run(session, "until [ -p ff ]; do :; done; echo go > ff")
    await rig.poll_to_the_end(background)
    clock.advance(99)
    assert await rig.service.expire() == []
    clock.advance(1)
    assert await rig.service.expire() == [session]


async def test_a_jump_of_the_wall_clock_ends_nothing(folder: Path, clock: ManualClock) -> None:
    async with open_rig(folder, clock) as rig:
        session = await rig.create(spec=SessionSpec(ttl=100))
        clock.wall_now += 1e9
        assert await rig.service.expire() == []
    clock.wall_now -= 2e9
    clock.now += 99
    async with open_rig(folder, clock) as rig:
        assert await rig.service.expire() == []
        clock.now += 1
        assert await rig.service.expire() == [session]


async def test_times_of_another_boot_are_not_compared(folder: Path, clock: ManualClock) -> None:
    async with open_rig(folder, clock) as rig:
        session = await rig.create(spec=SessionSpec(ttl=100))
    later = ManualClock("the next boot")
    later.now = 5000.0
    async with open_rig(folder, later) as rig:
        assert await rig.service.expire() == []
        later.now += 100
        assert await rig.service.expire() == [session]


# What is said about it


async def test_secrets_reach_neither_the_log_nor_the_database(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    entries = [ManifestFile("file", b"secret-in-a-file")]
    session = await rig.create(spec=SessionSpec(env={"TOKEN": "secret-of-the-session"}, manifest=entries))
    spec = RunSpec(session, "echo secret-in-code $TOKEN $OTHER", env={"OTHER": "secret-of-the-run"}, stdin=b"secret-in")
    result = await rig.service.runs.run(ALICE, spec)
    assert result.stdout == b"secret-in-code secret-of-the-session secret-of-the-run\n"
    await rig.poll_to_the_end(await rig.start_background(session, "echo secret-in-output $TOKEN"))
    await rig.service.sessions.destroy(ALICE, session)
    assert "secret" not in caplog.text
    assert "session_created" in caplog.text
    for path in rig.folder.glob("state.db*"):
        assert b"secret" not in path.read_bytes()
    assert "secret" not in rig.service.metrics.render()


async def test_the_environment_is_no_file_that_commands_can_read(rig: Rig) -> None:
    session = await rig.create(spec=SessionSpec(env={"TOKEN": "x"}))
    result = await rig.run(session, "ls /run/k8e-session; cat /run/k8e-session/env")
    assert result.stdout == b""
    assert result.stderr.count(b"Permission denied") == 2
    with fault(Kind.DENIED, "permission_denied"):
        await rig.service.files.read(ALICE, session, "/run/k8e-session/env")


async def test_gone_sessions_are_listed_when_asked_for(rig: Rig) -> None:
    gone, here = await rig.create(), await rig.create()
    await rig.service.sessions.destroy(ALICE, gone)
    assert [session.session_id for session in await rig.service.sessions.list(ALICE)] == [here]
    everything = await rig.service.sessions.list(ALICE, all_phases=True)
    assert [(session.session_id, session.phase) for session in everything] == [
        (gone, Phase.DESTROYED),
        (here, Phase.ACTIVE),
    ]


async def test_what_happens_is_counted(rig: Rig) -> None:
    session = await rig.create()
    await rig.run(session, "exit 3")
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.run("other", "true")
    await rig.service.sessions.destroy(ALICE, session)
    text = rig.service.metrics.render()
    for line in (
        "k8e_sessions 0",
        "k8e_creates_total 1",
        'k8e_destroys_total{reason="destroyed"} 1',
        'k8e_execs_total{status="completed"} 1',
        'k8e_failures_total{code="session_not_found"} 1',
        "k8e_create_seconds_count 1",
        'k8e_exec_seconds_bucket{le="+Inf"} 1',
    ):
        assert line in text.splitlines(), text


async def test_many_sessions_one_after_the_other_leave_nothing_behind(rig: Rig) -> None:
    await rig.service.sessions.destroy(ALICE, await rig.create())
    tasks, descriptors = len(asyncio.all_tasks()), count_descriptors()
    for _ in range(25):
        session = await rig.create()
        await rig.run(session, "true")
        await rig.service.sessions.destroy(ALICE, session)
    await rig.service._parts.tasks.close(10)
    assert (len(asyncio.all_tasks()), count_descriptors()) == (tasks, descriptors)
    registry = rig.service._registry
    assert (len(registry), registry._by_id, rig.service._foreground.running) == (0, {}, {})
    await rig.assert_no_trace()


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
