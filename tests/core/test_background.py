from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Kind
from k8e.core.model import OUTPUT_LIMIT, Language, RunResult, RunSpec, SessionSpec, Status
from k8e.core.runs.background import Background
from k8e.core.store.records import RunRecord
from tests.core.rig import ALICE, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create()


async def test_a_background_run_is_polled_to_its_end_as_often_as_one_likes(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "printf out; printf err >&2; exit 9")
    result = await rig.poll_to_the_end(run_id)
    assert (result.stdout, result.stderr, result.exit_code) == (b"out", b"err", 9)
    assert (result.status, result.truncated, result.stdout_bytes) == (Status.COMPLETED, False, 3)
    assert await rig.service.runs.poll(ALICE, run_id) == result
    link, _ = await rig.engine.attach(rig.sandbox_of(session))
    assert await link.commands() == []


async def test_while_it_runs_what_it_has_said_is_shown_as_often_as_one_likes(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "mkfifo go; printf 12345; printf e >&2; read line < go; printf 678")
    while (result := await rig.service.runs.poll(ALICE, run_id)).stdout_bytes < 5 or not result.stderr_bytes:
        await asyncio.sleep(0.005)
    for _ in range(3):
        result = await rig.service.runs.poll(ALICE, run_id)
        assert (result.status, result.exit_code, result.truncated) == (Status.RUNNING, None, False)
        assert (result.stdout, result.stderr) == (b"12345", b"e")
    assert [run.status for run in await rig.service.runs.list(ALICE, session)] == [Status.RUNNING]
    await rig.run(session, "echo > go")
    assert (await rig.poll_to_the_end(run_id)).stdout == b"12345678"


async def test_looking_on_neither_loses_output_nor_holds_the_command_up(rig: Rig, session: str) -> None:
    """More than the agent keeps, and looked at all the time."""
    code = "import os\nfor number in range(6000): os.write(1, b'%01023d\\n' % number)"
    run_id = (await rig.service.runs.run(ALICE, RunSpec(session, code, Language.PYTHON, background=True))).run_id
    while (result := await rig.service.runs.poll(ALICE, run_id)).status is Status.RUNNING:
        assert len(result.stdout) <= OUTPUT_LIMIT
        assert result.truncated == (len(result.stdout) < result.stdout_bytes)
        assert result.stdout[:1024] in (b"", b"%01023d\n" % 0)
    assert (result.stdout_bytes, result.exit_code) == (6000 << 10, 0)
    assert result.stdout.startswith(b"%01023d\n" % 0)
    assert result.stdout.endswith(b"%01023d\n" % 5999)


async def test_head_and_tail_of_long_output_are_kept(rig: Rig, session: str) -> None:
    code = "import os\nfor number in range(4096): os.write(1, b'%01024d' % number)"
    spec = RunSpec(session, code, Language.PYTHON, background=True)
    result = await rig.poll_to_the_end((await rig.service.runs.run(ALICE, spec)).run_id)
    assert (result.stdout_bytes, result.truncated) == (4 << 20, True)
    assert OUTPUT_LIMIT // 2 < len(result.stdout) <= OUTPUT_LIMIT
    assert result.stdout.startswith(b"%01024d" % 0)
    assert result.stdout.endswith(b"%01024d" % 4095)
    assert await rig.service.runs.poll(ALICE, result.run_id) == result


async def test_a_timeout_ends_it(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "echo a; sleep 1000", limit=0.3)
    result = await rig.poll_to_the_end(run_id)
    assert (result.status, result.exit_code, result.stdout) == (Status.TIMED_OUT, 124, b"a\n")


async def test_it_can_be_killed(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "echo a; setsid sleep 1000 & sleep 1001")
    while (await rig.service.runs.poll(ALICE, run_id)).stdout_bytes < 2:
        await asyncio.sleep(0.005)
    assert not await rig.service.runs.kill(ALICE, run_id)
    assert await rig.processes_inside(session) == []
    result = await rig.service.runs.poll(ALICE, run_id)
    assert (result.status, result.exit_code, result.stdout) == (Status.KILLED, 143, b"a\n")
    assert await rig.service.runs.kill(ALICE, run_id), "it had ended"


async def test_input_for_it_is_refused(rig: Rig, session: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", "stdin"):
        await rig.service.runs.run(ALICE, RunSpec(session, "cat", stdin=b"x", background=True))


async def test_a_command_that_does_not_start_leaves_no_run(rig: Rig, session: str) -> None:
    with fault(Kind.UNAVAILABLE, "program_not_found"):
        await rig.service.runs.run(ALICE, RunSpec(session, argv=(b"no-such-program",), background=True))
    assert await rig.service.runs.list(ALICE, session) == []
    assert await rig.service.expire() == []


async def test_who_leaves_before_hearing_its_id_takes_it_along(
    rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, insert = asyncio.Event(), rig.store.insert_run

    async def tell(run: RunRecord, keep: int) -> None:
        await insert(run, keep)
        begun.set()

    monkeypatch.setattr(rig.store, "insert_run", tell)
    task = asyncio.create_task(rig.start_background(session, "sleep 1000"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.service._parts.tasks.close(10)
    await rig.wait_until_alone(session)
    assert [run.status for run in await rig.service.runs.list(ALICE, session)] == [Status.KILLED]


async def test_their_number_is_bounded(rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.runs.background.MAX_BACKGROUND", 2)
    first = await rig.start_background(session, "sleep 1000")
    await rig.start_background(session, "sleep 1000")
    with fault(Kind.EXHAUSTED, "too_many_runs"):
        await rig.start_background(session, "sleep 1000")
    await rig.service.runs.kill(ALICE, first)
    await rig.start_background(session, "sleep 1000")


async def test_kept_output_is_bounded_and_the_oldest_goes_first(
    rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.core.runs.kept_output.KEPT_OUTPUT", 2500)
    ids = [await rig.start_background(session, f"printf %01000d {number}") for number in range(4)]
    for run_id in ids:
        await rig.poll_to_the_end(run_id)
    results = [await rig.service.runs.poll(ALICE, run_id) for run_id in ids]
    assert [len(result.stdout) for result in results] == [0, 0, 1000, 1000]
    assert [result.truncated for result in results] == [True, True, False, False]
    assert {(result.stdout_bytes, result.exit_code) for result in results} == {(1000, 0)}


async def test_output_that_cannot_be_kept_is_told_once(rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.runs.kept_output.STATE", b"/usr/not-writable")
    run_id = await rig.start_background(session, "echo a")
    assert (await rig.poll_to_the_end(run_id)).stdout == b"a\n"
    again = await rig.service.runs.poll(ALICE, run_id)
    assert (again.stdout, again.stdout_bytes, again.truncated, again.exit_code) == (b"", 2, True, 0)


async def test_upkeep_collects_what_is_not_polled(rig: Rig, session: str) -> None:
    for _ in range(5):
        await rig.start_background(session, "echo a")
    link, _ = await rig.engine.attach(rig.sandbox_of(session))
    while any(command.running for command in await link.commands()):
        await asyncio.sleep(0.005)
    await rig.service.look_after()
    assert await link.commands() == []
    log = await rig.service.runs.list(ALICE, session)
    assert [(run.status, run.stdout_bytes) for run in log] == [(Status.COMPLETED, 2)] * 5
    assert [(await rig.service.runs.poll(ALICE, run.run_id)).stdout for run in log] == [b"a\n"] * 5


async def test_polling_and_upkeep_at_once_collect_once(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "echo a")
    await asyncio.gather(*(rig.poll_to_the_end(run_id) for _ in range(5)), rig.service.look_after())
    assert (await rig.service.runs.poll(ALICE, run_id)).stdout == b"a\n"


async def test_it_goes_on_while_there_is_no_daemon(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(env={"WORD": "kept"}))
        running = await rig.start_background(session, "mkfifo go; read line < go; echo $line $WORD")
        ended = await rig.start_background(session, "echo early; exit 4")
        collected = await rig.start_background(session, "echo earlier")
        await rig.poll_to_the_end(collected)
    async with open_rig(folder) as rig:
        assert (await rig.service.runs.poll(ALICE, running)).status is Status.RUNNING
        result = await rig.service.runs.poll(ALICE, ended)
        assert (result.stdout, result.exit_code) == (b"early\n", 4)
        assert (await rig.service.runs.poll(ALICE, collected)).stdout == b"earlier\n"
        await rig.run(session, "until [ -p go ]; do :; done; echo later > go")
        assert (await rig.poll_to_the_end(running)).stdout == b"later kept\n"
        assert (await rig.run(session, "echo $WORD")).stdout == b"kept\n"


async def test_it_is_lost_with_a_sandbox_that_dies(rig: Rig, session: str, clock: ManualClock) -> None:
    run_id = await rig.start_background(session, "sleep 1000")
    sandbox = rig.sandbox_of(session)
    rig.engine.kill_sandbox(sandbox)
    while rig.engine.processes(sandbox):
        await asyncio.sleep(0.005)
    await rig.service.look_after()
    await rig.service._parts.tasks.close(10)
    result = await rig.service.runs.poll(ALICE, run_id)
    assert (result.status, result.exit_code) == (Status.LOST, None)


async def test_it_ends_with_its_session(rig: Rig, session: str) -> None:
    run_id = await rig.start_background(session, "sleep 1000")
    await rig.service.sessions.destroy(ALICE, session)
    with fault(Kind.NOT_FOUND, "run_not_found"):
        await rig.service.runs.poll(ALICE, run_id)
    await rig.assert_no_trace()


@pytest.mark.parametrize("restart", [False, True])
async def test_want_of_memory_is_said_also_by_the_next_daemon(folder: Path, restart: bool) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
        rig.engine.count_oom_kill(rig.sandbox_of(session))  # before: none of its business
        killed = await rig.start_background(session, "mkfifo a; read line < a; kill -KILL $$")
        if not restart:
            await check_killed(rig, session, killed)
    if restart:
        async with open_rig(folder) as rig:
            await check_killed(rig, session, killed)


async def check_killed(rig: Rig, session: str, killed: str) -> None:
    sandbox = rig.sandbox_of(session)
    early = await rig.start_background(session, "kill -KILL $$")
    assert (await rig.poll_to_the_end(early)).status is Status.KILLED
    rig.engine.count_oom_kill(sandbox)
    await rig.run(session, "until [ -p a ]; do :; done; echo > a")
    result = await rig.poll_to_the_end(killed)
    assert (result.status, result.exit_code) == (Status.OOM_KILLED, 137)


async def test_a_poll_leaves_out_what_the_caller_has_and_waits_for_more(rig: Rig, session: str) -> None:
    poll = rig.service.runs.poll
    run_id = await rig.start_background(session, "mkfifo go; printf 12345; read line < go; printf 678; printf e >&2")
    first = await poll(ALICE, run_id, wait=60)
    assert (first.stdout, first.status) == (b"12345", Status.RUNNING)
    nothing = await poll(ALICE, run_id, stdout_from=5)
    assert (nothing.stdout, nothing.stdout_bytes, nothing.truncated) == (b"", 5, False)
    waiting = asyncio.create_task(poll(ALICE, run_id, stdout_from=5, wait=60))
    await rig.run(session, "echo > go")
    more = await waiting
    assert more.stdout[:1] == b"6"
    last = await rig.poll_to_the_end(run_id)
    assert (last.stdout, last.stderr) == (b"12345678", b"e")
    assert (await poll(ALICE, run_id, stdout_from=7, wait=60)).stdout == b"8"
    assert (await poll(ALICE, run_id, stdout_from=8, stderr_from=1, wait=60)).status is Status.COMPLETED
    for wrong in ({"wait": 61}, {"stdout_from": -1}, {"stderr_from": -1}):
        with fault(Kind.INVALID, "invalid_argument"):
            await poll(ALICE, run_id, **wrong)


async def test_a_poll_that_waits_looks_seldom_and_holds_up_nothing(
    rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    poll = Background.poll

    async def count(*args: Any) -> RunResult:
        nonlocal looks
        looks += 1
        return await poll(*args)

    monkeypatch.setattr(Background, "poll", count)
    run_id = await rig.start_background(session, "sleep 1000")
    assert (await rig.service.runs.poll(ALICE, run_id, wait=2)).status is Status.RUNNING
    assert looks <= 8  # at 0, 0.1, 0.3, 0.7, 1.5 and 2 s
    waiting = [asyncio.create_task(rig.service.runs.poll(ALICE, run_id, wait=60)) for _ in range(20)]
    await asyncio.sleep(0)  # they have begun
    assert not await rig.service.runs.kill(ALICE, run_id)
    assert {result.status for result in await asyncio.gather(*waiting)} == {Status.KILLED}
