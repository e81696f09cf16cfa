"""Work that belongs to the service and not to whoever asked for it: it goes on when the caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from k8e.core.errors import Fault
from k8e.core.journal import LOGGER, warn

T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Fault):
            warn("fault", code=error.code, detail=error.detail)
        elif error is not None:
            LOGGER.error("unexpected", exc_info=error)

    async def close(self, patience: float) -> None:
        """Lets what is under way finish, for a while."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=patience)
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
