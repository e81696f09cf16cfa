"""One command in a session of its own, which is gone with it whatever happens to the caller."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.contract import LiveRun
from k8e.core.errors import Kind
from k8e.core.model import Language, Phase, RunSpec, SessionSpec, Status
from k8e.core.runs import foreground
from tests.core.rig import ALICE, BOB, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root

NOWHERE = ""  # a run's own session id is not looked at


async def start(rig: Rig, *argv: bytes, keep: bool = False) -> LiveRun:
    return await rig.as_door.runs.start_once(ALICE, SessionSpec(), RunSpec(NOWHERE, argv=argv), keep=keep)


async def read(run: LiveRun) -> bytes:
    return b"".join([chunk.data async for chunk in run.output()])


async def wait_for_nothing(rig: Rig) -> None:
    """A sandbox is taken down after its result was given."""
    while len(rig.service._registry):
        await asyncio.sleep(0.005)
    await rig.assert_no_trace()
    assert await rig.store.sessions() == [], "such a session leaves no record"


async def test_output_and_exit_code_come_back_and_nothing_stays(rig: Rig) -> None:
    run = await start(rig, b"sh", b"-c", b"echo out; echo err >&2; exit 7")
    assert run.session_id.startswith("run-")
    chunks = {chunk.stream: chunk.data async for chunk in run.output()}
    result = await run.result()
    assert (chunks, result.exit_code, result.session_id) == ({1: b"out\n", 2: b"err\n"}, 7, run.session_id)
    assert await rig.service.sessions.list(ALICE) == [], "not even for a moment after the result"
    await wait_for_nothing(rig)


async def test_all_output_is_read_although_the_session_is_over(rig: Rig) -> None:
    run = await start(rig, b"sh", b"-c", b"head -c 3000000 /dev/zero; exec 1>&-; echo end >&2")
    assert len(await read(run)) == 3_000_004
    assert (await run.result()).exit_code == 0
    await wait_for_nothing(rig)


async def test_to_its_end_without_a_stream(rig: Rig) -> None:
    spec = RunSpec(NOWHERE, "import sys; print(sys.stdin.read()[::-1])", Language.PYTHON, stdin=b"abc")
    result = await rig.as_door.runs.run_once(ALICE, SessionSpec(env={"A": "b"}), spec)
    assert (result.stdout, result.exit_code, result.status) == (b"cba\n", 0, Status.COMPLETED)
    await wait_for_nothing(rig)


async def test_is_kept_when_that_was_asked_for(rig: Rig) -> None:
    run = await start(rig, b"sh", b"-c", b"echo kept > file; exit 3", keep=True)
    await read(run)
    assert (await run.result()).exit_code == 3
    (session,) = await rig.service.sessions.list(ALICE)
    assert session.session_id == run.session_id
    assert (await rig.run(run.session_id, "cat file")).stdout == b"kept\n"


async def test_lingers_until_its_caller_has_left(rig: Rig) -> None:
    left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    spec = RunSpec(NOWHERE, argv=(b"sh", b"-c", b"echo left > file"))
    run = await rig.as_door.runs.start_once(ALICE, SessionSpec(), spec, until=left)
    await read(run)
    assert (await run.result()).exit_code == 0
    assert (await rig.run(run.session_id, "cat file")).stdout == b"left\n"
    left.set_result(None)
    await wait_for_nothing(rig)


async def test_a_kept_one_stays_when_the_client_leaves(rig: Rig) -> None:
    run = await start(rig, b"sleep", b"1000", keep=True)
    await run.kill()
    await rig.wait_until_alone(run.session_id)
    assert [session.session_id for session in await rig.service.sessions.list(ALICE)] == [run.session_id]


@pytest.mark.parametrize("keep", [False, True])
async def test_what_does_not_start_leaves_nothing(rig: Rig, keep: bool) -> None:
    with fault(Kind.UNAVAILABLE, "program_not_found", "argv"):
        await start(rig, b"no-such-program", keep=keep)
    while len(rig.service._registry):
        await asyncio.sleep(0.005)
    await rig.assert_no_trace()


async def test_what_cannot_be_run_costs_no_sandbox(rig: Rig) -> None:
    with fault(Kind.INVALID, "invalid_argument", "timeout"):
        await rig.service.runs.start_once(ALICE, SessionSpec(), RunSpec(NOWHERE, "true", timeout=-1))
    assert rig.service.metrics.creates.get() == 0


async def test_leaving_ends_the_tree_and_the_session(rig: Rig) -> None:
    run = await start(rig, b"sh", b"-c", b"trap 'echo bye > /tmp/x' TERM; setsid sleep 1000 & echo ready; wait")
    assert (await anext(aiter(run.output()))).data == b"ready\n"
    await run.kill()
    await wait_for_nothing(rig)


@pytest.mark.parametrize("moment", [0, 0.01, 0.05])
async def test_leaving_early_leaves_nothing(rig: Rig, moment: float) -> None:
    starting = asyncio.create_task(start(rig, b"sleep", b"1000"))
    await asyncio.sleep(moment)
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled():
        await starting.result().kill()
    await wait_for_nothing(rig)


async def test_the_daemon_takes_them_along_when_it_stops(folder: Path) -> None:
    async with open_rig(folder) as rig:
        run = await start(rig, b"sleep", b"1000")
        asking = asyncio.create_task(run.result())
    assert (await asking).status is Status.KILLED
    await rig.assert_no_trace()


async def test_the_next_daemon_removes_what_a_crash_left(folder: Path) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=SessionSpec(session_id="one"))
        await rig.create(spec=SessionSpec(session_id="two"))
        stays = rig.sandbox_of("two")
    connection = sqlite3.connect(folder / "state.db", isolation_level=None)
    connection.execute("UPDATE sessions SET fleeting = 1 WHERE session_id = 'one'")
    connection.close()
    async with open_rig(folder) as rig:
        assert await rig.engine.list() == [stays]
        assert [record.session.session_id for record in await rig.store.sessions()] == ["two"]


async def test_it_is_on_record_as_such_before_there_is_a_sandbox(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is no moment for a crash to make one that stays."""
    seen: list[tuple[Phase, bool]] = []
    create = rig.engine.create

    async def look(sandbox: str, spec: object) -> None:
        record = await rig.store.find_session(sandbox)
        assert record is not None
        seen.append((record.session.phase, record.fleeting))
        await create(sandbox, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.engine, "create", look)
    run = await start(rig, b"true")
    await read(run)
    await run.result()
    assert seen == [(Phase.CREATING, True)]
    await wait_for_nothing(rig)


async def test_who_starts_more_than_can_be_cleared_away_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "_LEAVING", 2)
    held = asyncio.Event()
    destroy = rig.engine.destroy

    async def hold(sandbox: str) -> None:
        await held.wait()
        await destroy(sandbox)

    monkeypatch.setattr(rig.engine, "destroy", hold)
    for _ in range(2):
        run = await start(rig, b"true")
        await read(run)
        await run.result()
    third = asyncio.create_task(start(rig, b"true"))
    other = await rig.service.runs.start_once(BOB, SessionSpec(), RunSpec(NOWHERE, "true"))
    assert not third.done(), "but others do not wait with them"
    held.set()
    for run in (await third, other):
        await read(run)
        await run.result()
    await wait_for_nothing(rig)


async def test_an_entrypoint_comes_first_where_that_was_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = rig.engine.attach

    async def attach_to_image(sandbox: str) -> object:
        link, place = await attach(sandbox)
        return link, replace(place, entrypoint=(b"/usr/bin/env", b"A=1"), command=(b"sh", b"-c", b"echo its own $A"))

    monkeypatch.setattr(rig.engine, "attach", attach_to_image)

    async def run(*argv: bytes, entrypoint: bool = True) -> bytes:
        spec = RunSpec(NOWHERE, argv=argv, entrypoint=entrypoint)
        return (await rig.service.runs.run_once(ALICE, SessionSpec(), spec)).stdout

    assert await run() == b"its own 1\n"
    assert await run(b"sh", b"-c", b"echo $A") == b"1\n"
    assert await run(b"env", b"sh", b"-c", b"echo $A.") == b".\n", "the caller has typed it already"
    assert await run(b"sh", b"-c", b"echo $A.", entrypoint=False) == b".\n"
