"""Work that belongs to the service and not to whoever asked for it: it goes on when the caller is gone."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any, TypeVar

from k8e.core.errors import Fault
from k8e.core.log.journal import LOGGER, warn

T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, T], *, watched: bool = False) -> asyncio.Task[T]:
        """Somebody else hears of the faults of a watched one; those of others are in the log."""
        task = asyncio.get_running_loop().create_task(work)
        if self._closed:
            task.cancel()  # before its first line: what it would work with is being closed, and nobody waits for it
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
        """Lets what is under way finish, for a while."""
        try:
            async with asyncio.timeout(patience):
                while self._tasks:  # one may begin another
                    await asyncio.wait(set(self._tasks))
        except TimeoutError:
            warn("not_finished", tasks=len(self._tasks))
        self._closed = True
        while rest := set(self._tasks):
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
