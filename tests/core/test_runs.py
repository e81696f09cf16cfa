from __future__ import annotations

import asyncio
import inspect

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import OUTPUT_LIMIT, Language, RunSpec, SessionSpec, Status
from tests.core.bare_engine import BareEngine
from tests.core.rig import ALICE, Rig, fault
from tests.sandboxes import needs_root

pytestmark = needs_root

MEGABYTES = "import os\nfor number in range({blocks}): os.write({fd}, b'%0{width}d' % number)"


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create(spec=SessionSpec(env={"SET": "by session", "OVER": "session"}))


async def test_both_streams_and_the_exit_code_are_exact(rig: Rig, session: str) -> None:
    result = await rig.run(session, "printf 'out\\0\\377'; printf err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\0\xff", b"err", 7)
    assert (result.status, result.truncated) == (Status.COMPLETED, False)
    assert (result.stdout_bytes, result.stderr_bytes, result.session_id) == (5, 3, session)


@pytest.mark.parametrize("code", ["true", "false"])
async def test_a_run_asks_the_engine_once_before_and_once_after(
    rig: Rig, session: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for the link. Each question is on the way of every command."""
    questions = []

    class Counting(BareEngine):
        def __getattribute__(self, name: str) -> object:
            if inspect.iscoroutinefunction(getattr(BareEngine, name, None)) and not name.startswith("_"):
                questions.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(rig.engine, "__class__", Counting)
    await rig.run(session, code)
    assert questions == ["attach", "observe", "observe"]


@pytest.mark.parametrize("code", ["print('a')", "print('a')\n", "x = 'a'\nprint(\n  x)", 'print("a") # \'$HOME` \\'])
async def test_one_line_or_many_are_the_same(rig: Rig, session: str, code: str) -> None:
    result = await rig.service.runs.run(ALICE, RunSpec(session, code, Language.PYTHON))
    assert (result.stdout, result.stderr, result.exit_code) == (b"a\n", b"", 0)


async def test_the_environment_is_the_places_then_the_sessions_then_the_runs(rig: Rig, session: str) -> None:
    spec = RunSpec(session, "echo $LANG,$SET,$OVER", env={"OVER": "run"})
    assert (await rig.service.runs.run(ALICE, spec)).stdout == b"C.UTF-8,by session,run\n"
    assert (await rig.run(session, "echo $OVER")).stdout == b"session\n"


async def test_the_working_directory_is_the_one_asked_for(rig: Rig, session: str) -> None:
    await rig.run(session, "mkdir sub")
    for workdir, expected in (("", b"/workspace\n"), ("sub", b"/workspace/sub\n"), ("/tmp", b"/tmp\n")):
        assert (await rig.service.runs.run(ALICE, RunSpec(session, "pwd", workdir=workdir))).stdout == expected
    with fault(Kind.INVALID, "workdir_not_found", "workdir"):
        await rig.service.runs.run(ALICE, RunSpec(session, "pwd", workdir="nowhere"))


async def test_an_argv_is_taken_as_it_is(rig: Rig, session: str) -> None:
    spec = RunSpec(session, argv=(b"printf", b"%s|", b"$HOME", b"a b", b"\xff", b""))
    assert (await rig.service.runs.run(ALICE, spec)).stdout == b"$HOME|a b|\xff||"
    with fault(Kind.UNAVAILABLE, "program_not_found", "argv"):
        await rig.service.runs.run(ALICE, RunSpec(session, argv=(b"no-such-program",)))
    assert [run.status for run in await rig.service.runs.list(ALICE, session)] == [Status.COMPLETED]


@pytest.mark.parametrize("stdin", [b"", b"line\n", bytes(range(256)) * 20_000])
async def test_stdin_arrives_exactly(rig: Rig, session: str, stdin: bytes) -> None:
    result = await rig.service.runs.run(ALICE, RunSpec(session, argv=(b"wc", b"-c"), stdin=stdin))
    assert int(result.stdout) == len(stdin)


async def test_stdin_that_is_not_read_is_no_error(rig: Rig, session: str) -> None:
    result = await rig.service.runs.run(ALICE, RunSpec(session, "exec <&-; exit 3", stdin=b"x" * 5_000_000))
    assert (result.exit_code, result.status) == (3, Status.COMPLETED)


@pytest.mark.parametrize("fd", [1, 2])
async def test_of_long_output_head_and_tail_are_kept_and_all_is_counted(rig: Rig, session: str, fd: int) -> None:
    code = MEGABYTES.format(blocks=5 * 1024, fd=fd, width=1024)
    result = await rig.service.runs.run(ALICE, RunSpec(session, code, Language.PYTHON))
    streams = {1: (result.stdout, result.stdout_bytes), 2: (result.stderr, result.stderr_bytes)}
    content, total = streams.pop(fd)
    assert streams.popitem()[1] == (b"", 0)
    assert (total, len(content), result.truncated) == (5 << 20, OUTPUT_LIMIT, True)
    numbers = [int(content[at : at + 1024]) for at in range(0, OUTPUT_LIMIT, 1024)]
    assert numbers == [*range(512), *range(5 * 1024 - 512, 5 * 1024)]


async def test_output_up_to_the_limit_is_whole(rig: Rig, session: str) -> None:
    code = f"import os; os.write(1, b'x' * {OUTPUT_LIMIT // 2}); os.write(1, b'y' * {OUTPUT_LIMIT // 2})"
    result = await rig.service.runs.run(ALICE, RunSpec(session, code, Language.PYTHON))
    assert (len(result.stdout), result.truncated) == (OUTPUT_LIMIT, False)


async def test_a_timeout_leaves_no_process_and_returns_the_output_so_far(rig: Rig, session: str) -> None:
    code = "echo so far; trap '' TERM; setsid sleep 1000 & (sleep 1001 &) ; sleep 1002"
    result = await rig.service.runs.run(ALICE, RunSpec(session, code, timeout=0.5))
    assert (result.exit_code, result.status, result.stdout) == (124, Status.TIMED_OUT, b"so far\n")
    assert await rig.processes_inside(session) == []


async def test_a_signal_is_128_and_its_number(rig: Rig, session: str) -> None:
    result = await rig.run(session, "kill -SEGV $$")
    assert (result.exit_code, result.status) == (128 + 11, Status.KILLED)


async def test_want_of_memory_is_said(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "read line; kill -KILL $$"))
    rig.engine.count_oom_kill(rig.sandbox_of(session))
    await run.close_stdin()
    assert [chunk async for chunk in run.output()] == []
    result = await run.result()
    assert (result.exit_code, result.status) == (137, Status.OOM_KILLED)
    # It counts for what ran then, and for nothing that comes later.
    assert (await rig.run(session, "kill -KILL $$")).status is Status.KILLED


# A caller leaves


async def test_who_cancels_a_run_ends_its_tree(rig: Rig, session: str) -> None:
    task = asyncio.create_task(rig.run(session, "echo $$ > pid; setsid sleep 1000 & wait"))
    while b"pid" not in {entry.name.rpartition(b"/")[2] for entry in await rig.service.files.list(ALICE, session)}:
        await asyncio.sleep(0.005)
    assert await rig.processes_inside(session)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.wait_until_alone(session)
    while (await rig.service.runs.list(ALICE, session))[0].status is Status.RUNNING:
        await asyncio.sleep(0.005)
    assert [run.status for run in await rig.service.runs.list(ALICE, session)] == [Status.KILLED]


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_who_cancels_at_any_moment_leaves_no_process(rig: Rig, session: str, steps: int) -> None:
    task = asyncio.create_task(rig.run(session, "setsid sleep 1000 & sleep 1000"))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.service._parts.tasks.close(10)
    await rig.wait_until_alone(session)
    assert {run.status for run in await rig.service.runs.list(ALICE, session)} <= {Status.KILLED}


async def test_a_live_run_gives_output_as_it_comes(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(
        ALICE, RunSpec(session, "echo ready; while read x; do echo $x >&2; done; exit 5")
    )
    got = {1: b"", 2: b""}
    async for chunk in run.output():
        got[chunk.stream] += chunk.data
        if chunk.stream == 1:
            await run.write_stdin(b"one\n")
        elif chunk.data == b"one\n":
            await run.write_stdin(b"two\n")
            await run.close_stdin()
    result = await run.result()
    assert got == {1: b"ready\n", 2: b"one\ntwo\n"}
    assert (result.stdout, result.stderr, result.exit_code) == (b"", b"", 5)
    assert (result.stdout_bytes, result.stderr_bytes) == (6, 8)
    await run.write_stdin(b"too late")
    await run.kill()


async def test_a_stream_that_never_pauses_keeps_the_other_from_nothing(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "yes & read line; echo $line >&2; wait"))
    sent = False
    async for chunk in run.output():
        if chunk.stream == 2:
            assert chunk.data == b"now\n"
            break
        if not sent:
            sent = True
            await run.write_stdin(b"now\n")
    await run.kill()
    await rig.wait_until_alone(session)


async def test_the_stdin_of_a_live_run_may_come_with_it(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, argv=(b"cat",), stdin=b"all of it"))
    assert b"".join([chunk.data async for chunk in run.output()]) == b"all of it"
    assert (await run.result()).exit_code == 0


async def test_leaving_a_live_run_ends_it(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "echo a; yes > /dev/null & yes"))
    async for chunk in run.output():
        assert chunk.data.startswith(b"a\n")
        break
    await run.kill()
    await rig.wait_until_alone(session)
    assert (await run.result()).status is Status.KILLED


async def test_a_live_run_whose_output_is_not_read_is_held_up_not_piled_up(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "yes", timeout=0.5))
    link, _ = await rig.engine.attach(rig.sandbox_of(session))
    while link.queued < 256 << 10:  # a window
        await asyncio.sleep(0.005)
    assert (await rig.run(session, "echo neighbours go on")).exit_code == 0
    assert link.queued <= 512 << 10
    total = sum([len(chunk.data) async for chunk in run.output()])
    result = await run.result()
    assert (result.exit_code, result.stdout_bytes) == (124, total)


async def test_a_run_can_be_killed_by_its_id(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "echo a; sleep 1000"))
    output = run.output()
    assert (await anext(output)).data == b"a\n"
    assert [command.name for command in await rig.service.runs.commands(ALICE, session)] == [b"bash"]
    assert (await rig.service.runs.poll(ALICE, run.run_id)).status is Status.RUNNING
    await rig.service.runs.kill(ALICE, run.run_id)
    assert [chunk async for chunk in output] == []
    result = await run.result()
    assert (result.status, result.exit_code) == (Status.KILLED, 143)
    assert (await rig.service.runs.poll(ALICE, run.run_id)) == result
    await rig.service.runs.kill(ALICE, run.run_id)
    assert await rig.service.runs.commands(ALICE, session) == []


# The sandbox goes


async def test_a_sandbox_that_dies_under_a_run_is_a_loss(rig: Rig, session: str) -> None:
    task = asyncio.create_task(rig.run(session, "sleep 1000"))
    while not await rig.processes_inside(session):
        await asyncio.sleep(0.005)
    sandbox = rig.sandbox_of(session)
    rig.engine.kill_sandbox(sandbox)
    while rig.engine.processes(sandbox):
        await asyncio.sleep(0.005)
    await rig.service.look_after()
    with pytest.raises(Fault) as caught:
        await task
    assert (caught.value.kind, caught.value.code) == (Kind.LOST, "session_ended")
    assert caught.value.hint
    with pytest.raises(Fault) as caught:
        await rig.run(session, "true")
    assert caught.value.kind in (Kind.NOT_FOUND, Kind.CONFLICT)
    await rig.service._parts.tasks.close(10)
    await rig.assert_no_trace()


async def test_a_sandbox_that_died_is_noticed_by_the_next_request(rig: Rig, session: str) -> None:
    sandbox = rig.sandbox_of(session)
    rig.engine.kill_sandbox(sandbox)
    while rig.engine.processes(sandbox):
        await asyncio.sleep(0.005)
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.run(session, "true")
    await rig.service._parts.tasks.close(10)
    await rig.assert_no_trace()


@pytest.mark.parametrize("upkeep", [True, False])
async def test_a_sandbox_that_dies_of_memory_says_so(rig: Rig, session: str, upkeep: bool) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, "sleep 1000"))
    sandbox = rig.sandbox_of(session)
    rig.engine.count_oom_kill(sandbox)
    rig.engine.kill_sandbox(sandbox)
    while rig.engine.processes(sandbox):
        await asyncio.sleep(0.005)
    if upkeep:
        await rig.service.look_after()
    assert [chunk async for chunk in run.output()] == []
    result = await run.result()
    assert (result.status, result.exit_code) == (Status.OOM_KILLED, 137)


async def test_destroying_a_session_answers_who_waits_in_it(rig: Rig, session: str) -> None:
    task = asyncio.create_task(rig.run(session, "sleep 1000"))
    while not await rig.processes_inside(session):
        await asyncio.sleep(0.005)
    await rig.service.sessions.destroy(ALICE, session)
    with fault(Kind.LOST, "session_ended"):
        await task


async def test_many_runs_at_once_do_not_mix(rig: Rig, session: str) -> None:
    async def one(number: int) -> None:
        spec = RunSpec(session, f"cat; echo {number} >&2; exit {number}", stdin=b"%d" % number)
        result = await rig.service.runs.run(ALICE, spec)
        assert (result.stdout, result.stderr, result.exit_code) == (b"%d" % number, b"%d\n" % number, number)

    await asyncio.gather(*(one(number) for number in range(40)))
    assert len({run.run_id for run in await rig.service.runs.list(ALICE, session)}) == 40


async def test_the_log_of_a_session_is_bounded(rig: Rig, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.core.runs.launcher.KEPT_RUNS", 5)
    for number in range(9):
        await rig.run(session, f"exit {number}")
    assert [run.exit_code for run in await rig.service.runs.list(ALICE, session)] == [4, 5, 6, 7, 8]
