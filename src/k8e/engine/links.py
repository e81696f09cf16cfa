"""The links to the agents of an engine's sandboxes: each sandbox has one, opened when it is first wanted and given to
every caller. No caller waits for a silent agent once its sandbox is stopped or destroyed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from weakref import WeakValueDictionary

from k8e.engine.tasks import cancel_and_wait
from k8e.link import AgentLink
from k8e.link.errors import LinkLost

Dial = Callable[[str], Coroutine[Any, Any, AgentLink]]


class Links:
    def __init__(self, dial: Dial) -> None:
        """`dial` opens the link to a sandbox that was made before."""
        self._dial = dial
        self._open: dict[str, AgentLink] = {}
        self._dialling: dict[str, asyncio.Task[AgentLink]] = {}
        self._ending: Counter[str] = Counter()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # gone with their last user

    def lock(self, sandbox: str) -> asyncio.Lock:
        """Held while a sandbox's link is opened, or everything of it is removed."""
        lock = self._locks.get(sandbox)
        if lock is None:
            lock = self._locks[sandbox] = asyncio.Lock()
        return lock

    def is_ending(self, sandbox: str) -> bool:
        return sandbox in self._ending

    async def open(self, sandbox: str, dial: Dial | None = None) -> AgentLink:
        """`dial`: how, if it is just being started."""
        link = self._open.get(sandbox)
        if link is not None and link.failure is None and sandbox not in self._ending:
            return link  # as for nearly every command
        async with self.lock(sandbox):
            if self._ending[sandbox]:
                raise LinkLost("the sandbox is being ended")
            if sandbox in self._open and self._open[sandbox].failure:
                await self._open.pop(sandbox).close()
            if sandbox not in self._open:
                opening = (dial or self._dial)(sandbox)
                self._open[sandbox] = await self._wait_for(sandbox, asyncio.create_task(opening))
            return self._open[sandbox]

    async def _wait_for(self, sandbox: str, dialling: asyncio.Task[AgentLink]) -> AgentLink:
        """Waits until the agent answers, or the sandbox is stopped or destroyed."""
        self._dialling[sandbox] = dialling
        try:
            await asyncio.wait({dialling})
        except asyncio.CancelledError:
            await cancel_and_wait(dialling)
            if not dialling.cancelled() and dialling.exception() is None:
                await dialling.result().close()
            raise
        finally:
            del self._dialling[sandbox]
        if dialling.cancelled():
            raise LinkLost("the sandbox is being ended")
        return dialling.result()

    @contextlib.asynccontextmanager
    async def ended(self, sandbox: str) -> AsyncIterator[None]:
        """Closes the link, and opens none until the end of the block: callers that dial it, or wait for their turn to
        do so, are sent away."""
        self._ending[sandbox] += 1
        if dialling := self._dialling.get(sandbox):
            dialling.cancel()
        try:
            async with self.lock(sandbox):
                if link := self._open.pop(sandbox, None):
                    await link.close()
                yield
        finally:
            self._ending[sandbox] -= 1
            if not self._ending[sandbox]:
                del self._ending[sandbox]

    async def close(self) -> None:
        for link in self._open.values():
            await link.close()
        self._open.clear()
