"""Work of the service's own ends with the service, also what would only have begun then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from k8e.core.model import RunSpec
from k8e.core.tasks import Tasks, do_by, do_in_turn, stop
from tests.core.rig import ALICE, open_rig
from tests.sandboxes import needs_root


async def test_what_is_under_way_may_finish() -> None:
    tasks, done = Tasks(), []

    async def work(more: int) -> None:
        await asyncio.sleep(0)
        if more:
            tasks.spawn(work(more - 1))
        done.append(more)

    tasks.spawn(work(2))
    await tasks.close(60.0)
    assert done == [2, 1, 0]


async def test_work_that_need_not_wait_is_done_by_any_time() -> None:
    async def work() -> str:
        return "done"

    assert await do_by(0.0, work()) == "done"


async def test_work_that_waits_has_its_time_and_its_own_task() -> None:
    loop, tasks = asyncio.get_running_loop(), []

    async def work() -> str:
        tasks.append(asyncio.current_task())
        for _ in range(3):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await loop.create_future()
        tasks.append(asyncio.current_task())
        return "done"

    assert await do_by(loop.time() + 60, work()) == "done"
    assert tasks == [asyncio.current_task()] * 2


async def test_work_that_takes_too_long_is_ended_and_cleans_up() -> None:
    loop, ended = asyncio.get_running_loop(), []

    async def work() -> None:
        try:
            await loop.create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(TimeoutError):
        await do_by(loop.time() + 0.01, work())
    assert ended == [True]


async def test_a_caller_that_leaves_takes_its_work_with_it_and_its_errors_are_the_callers() -> None:
    loop, ended = asyncio.get_running_loop(), []

    async def work() -> None:
        try:
            await loop.create_future()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    caller = asyncio.create_task(do_by(loop.time() + 60, work()))
    await asyncio.sleep(0)
    await stop(caller)
    assert (caller.cancelled(), ended) == (True, [True])

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError

    with pytest.raises(LookupError):
        await do_by(loop.time() + 60, fail())


async def test_work_goes_on_when_its_caller_leaves() -> None:
    tasks, told, done = Tasks(), asyncio.Event(), []

    async def work() -> None:
        await told.wait()
        done.append(True)

    caller = asyncio.create_task(tasks.finish(work()))
    await asyncio.sleep(0)
    await stop(caller)
    told.set()
    await tasks.close(60.0)
    assert (caller.cancelled(), done) == (True, [True])


async def test_nothing_begins_once_it_is_closed() -> None:
    tasks, begun = Tasks(), []

    async def begin() -> None:
        begun.append(True)

    async def stay() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(begin())  # as it is cut off, when no loop would look for more

    staying = tasks.spawn(stay())
    await tasks.close(0.0)
    assert staying.cancelled()
    late = tasks.spawn(begin())
    await asyncio.wait({late})
    assert late.cancelled()
    assert begun == []


@needs_root
async def test_runs_that_end_with_the_service_are_followed_by_nothing(folder: Path) -> None:
    """Else an interpreter would be parked a moment later, in a sandbox whose link is closed, by a loop that may be."""
    async with open_rig(folder) as rig:
        session = await rig.create()
        running = asyncio.create_task(rig.service.runs.run(ALICE, RunSpec(session, "sleep 600")))
        while not rig.service._foreground.running:
            await asyncio.sleep(0.01)
    await asyncio.wait({running})
    loop = asyncio.get_running_loop()
    scheduled = [timer for timer in getattr(loop, "_scheduled") if not timer.cancelled()]  # noqa: B009 - the loop's own
    assert [
        timer for timer in scheduled if getattr(timer._callback, "__self__", None) is rig.service._interpreters
    ] == []
    assert not rig.service._parts.tasks._tasks
    assert running.done()
    running.exception()


async def test_work_for_many_lets_other_work_go_between() -> None:
    """However many there are, and even if none of it waits for anything."""
    most = since = 0

    async def work(number: int) -> None:
        nonlocal most, since
        since += 1
        most = max(most, since)
        done.add(number)

    async def tick() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    done: set[int] = set()
    ticking = asyncio.create_task(tick())
    await do_in_turn(work, range(100), 4)
    await stop(ticking)
    assert done == set(range(100))
    assert most <= 2 * 4
