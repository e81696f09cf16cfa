"""Work that ends before its caller does, also when the caller is cancelled: a roll-back must not meet it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


async def finish(doing: Coroutine[Any, Any, T]) -> T:
    """Does it to its end. A cancellation waits for that end, and does not cut it short."""
    work = asyncio.ensure_future(doing)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await _wait_for(work)
        raise


async def finish_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, to its end."""
    return await finish(asyncio.to_thread(function, *args, **kwargs))


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
