"""Work in tasks and threads: work that ends before its caller does, also when the caller is cancelled, so that a
roll-back does not meet it; work that has a thread of its own; work that is done once for all its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Key = TypeVar("Key")


async def finish(doing: Coroutine[Any, Any, T]) -> T:
    """Does it to its end. A cancellation waits for that end, and does not cut it short."""
    work = asyncio.ensure_future(doing)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await _wait_for(work)
        raise


async def finish_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does it as `asyncio.to_thread` does, to its end."""
    return await finish(asyncio.to_thread(function, *args, **kwargs))


def in_own_thread(work: Callable[[], T]) -> T:
    """Does work that changes its thread (namespaces, ids, filter) in a thread that ends with it: nothing has to be set
    back, and no other work meets the change. Blocks until then, and raises what it raised."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="k8e-own") as thread:
        return thread.submit(work).result()


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

    async def close(self) -> None:
        """Cancels what is under way, and forgets it. Results stay."""
        for key, task in list(self.tasks.items()):
            if not task.done():
                del self.tasks[key]
                await cancel_and_wait(task)
