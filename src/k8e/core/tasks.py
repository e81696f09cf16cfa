"""Work that belongs to the service and not to the caller who asked for it: the caller may leave, the work goes on.

No `wait_` function cancels what it waits for, whatever happens to the waiter.
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import LOGGER, warn

T = TypeVar("T")


def wait_result(work: Awaitable[T]) -> Awaitable[T]:
    """The result of the work, or its exception."""
    return asyncio.shield(work)


async def wait_done(*work: asyncio.Future[Any], timeout: float | None = None) -> None:  # noqa: ASYNC109
    """Returns when all of it is done, however it ended, or after `timeout` seconds."""
    if work:
        await asyncio.wait(work, timeout=timeout)


async def wait_first(*work: asyncio.Future[Any], timeout: float | None = None) -> bool:  # noqa: ASYNC109
    """Returns when one of them is done, however it ended, or after `timeout` seconds; whether one is."""
    done, _ = await asyncio.wait(work, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def do_by(due: float, work: Coroutine[Any, Any, T]) -> T:
    """Does the work in the caller's own task. Raises TimeoutError at `due`, in the loop's time, as asyncio.timeout_at
    has it; but work that need not wait costs no timer."""
    try:
        waits_for = work.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    async with asyncio.timeout_at(due):
        return await _go_on(work, waits_for)


@types.coroutine
def _go_on(work: Coroutine[Any, Any, T], waits_for: object) -> Generator[object, Any, T]:
    """Work whose first steps are done: it waits for something."""
    try:
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001 - all are for the work
                waits_for = work.throw(error)
            else:
                waits_for = work.send(sent)
    except StopIteration as done:
        value: T = done.value
        return value


async def stop(*work: asyncio.Task[Any]) -> None:
    """Cancels the work and returns when it has ended."""
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)


async def do_in_turn(work: Callable[[T], Awaitable[object]], items: Iterable[T], at_once: int) -> None:
    """Does the work for each of them, `at_once` at a time, and lets requests go between two: however many there are,
    the loop is never busy with more than a few."""
    waiting = iter(items)

    async def do_some() -> None:
        for item in waiting:
            await work(item)
            await asyncio.sleep(0)

    await asyncio.gather(*(do_some() for _ in range(at_once)))


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Does the work to its end, also when the caller leaves in the middle; a caller who stays has its result."""
        return await wait_result(self.spawn(work, watched=True))

    def spawn(self, work: Coroutine[Any, Any, T], *, watched: bool = False) -> asyncio.Task[T]:
        """Begins the work. The faults of watched work reach a waiter; those of other work are logged."""
        task = asyncio.get_running_loop().create_task(work)
        if self._closed:
            task.cancel()  # before its first line: what it would work with is being closed, and no caller waits for it
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, watched))
        return task

    def _done(self, watched: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Fault):
            if watched:
                return
            warn("fault", code=error.code, detail=error.detail)
        elif error is not None:
            LOGGER.error("unexpected", exc_info=error)

    async def close(self, patience: float) -> None:
        """Lets what is under way finish within `patience` seconds, then cancels the rest."""
        try:
            async with asyncio.timeout(patience):
                while self._tasks:  # one may begin another
                    await wait_done(*self._tasks)
        except TimeoutError:
            warn("not_finished", tasks=len(self._tasks))
        self._closed = True
        while self._tasks:
            await stop(*self._tasks)
