"""Work in tasks and threads: work that ends before its caller does, also when the caller is cancelled, so that a
roll-back does not meet it; work that has a thread of its own; work that is done once for all its callers; sandboxes
that are being made."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, TypeVar

from k8e.engine import EngineError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Key = TypeVar("Key")


async def finish(doing: Coroutine[Any, Any, T]) -> T:
    """Does it to its end. A cancellation waits for that end, and does not cut it short."""
    return await _finish(asyncio.ensure_future(doing))


async def finish_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does it in a thread, to its end. Without a task: the life of a sandbox takes a dozen of these."""
    work = functools.partial(function, *args, **kwargs)
    return await _finish(asyncio.get_running_loop().run_in_executor(None, work))


async def _finish(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await _wait_for(work)
        raise


def in_own_thread(work: Callable[[], T]) -> T:
    """Does work that changes its thread (namespaces, ids, filter) in a thread that ends with it: nothing has to be set
    back, and no other work meets the change. Blocks until then, and raises what it raised."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - all of them are for the caller, who waits
            errors.append(error)

    thread = threading.Thread(target=run, name="k8e-own")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def do_both(one: Coroutine[Any, Any, S], other: Coroutine[Any, Any, T]) -> tuple[S, T]:
    """Does both at the same time. When this ends both have ended, however."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return first.result(), second.result()


async def cancel_and_wait(work: asyncio.Task[Any]) -> None:
    """Returns when it has ended, however; its own awaiter has its exception."""
    work.cancel()
    await _wait_for(work)


async def _wait_for(work: asyncio.Future[Any]) -> None:
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()  # which is seen now, and not logged as lost


class Once(Generic[Key, T]):
    """Work that is done once for each key, and goes on without the caller who asked first. What failed is done again
    for the next caller."""

    def __init__(self) -> None:
        self.tasks: dict[Key, asyncio.Task[T]] = {}

    async def get(self, key: Key, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = self.tasks.get(key)
        if task is None:
            task = self.tasks[key] = asyncio.create_task(work())
        try:
            return await asyncio.shield(task)
        except Exception:
            if self.tasks.get(key) is task:
                del self.tasks[key]
            raise

    def forget(self, key: Key) -> None:
        """Drops a result that does not hold any more, so that the next caller has the work done again."""
        if (task := self.tasks.get(key)) is not None and task.done():
            del self.tasks[key]

    async def close(self) -> None:
        """Cancels what is under way, and forgets it. Results stay."""
        for key, task in list(self.tasks.items()):
            if not task.done():
                del self.tasks[key]
                await cancel_and_wait(task)


class Makings:
    """Sandboxes that are being made, started or bound: each in a task, one at a time for each sandbox, which `stop` and
    `destroy` end first."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def do(self, sandbox: str, making: Coroutine[Any, Any, None], *, taken: str) -> None:
        """`taken`: what the sandbox is when another such work is under way."""
        if sandbox in self._tasks:
            making.close()
            raise EngineError("sandbox", f"{sandbox} {taken}")
        work = self._tasks[sandbox] = asyncio.create_task(making)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise EngineError("sandbox", f"{sandbox} was stopped or destroyed while it was being made") from None
            await cancel_and_wait(work)
            raise
        finally:
            del self._tasks[sandbox]

    async def end(self, sandbox: str) -> None:
        if work := self._tasks.get(sandbox):
            await cancel_and_wait(work)

    async def close(self) -> None:
        for work in list(self._tasks.values()):
            await cancel_and_wait(work)
