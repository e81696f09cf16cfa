"""Sessions of clients without a connection: each is found by its handle, the session id of the answer.

Core ends a session that was not used for a while. A session whose handle no client has used yet ends sooner, and one
whose handle was never delivered at once: a model that forgets its handle leaves no row of sandboxes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from k8e.core.contract import WholeService
from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.mcp.clients import TTL, destroy_all

UNUSED: Final = 300.0  # seconds from the answer with the handle to its first use

Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Handle:
    caller: Caller
    used: bool = False
    timer: asyncio.TimerHandle | None = None


class Handles:
    """By tenant: such a session has a tenant of its own."""

    def __init__(self, service: WholeService, spawn: Spawn, unused: float = UNUSED) -> None:
        self._service = service
        self._spawn = spawn
        self._unused = unused
        self._handles: dict[str, _Handle] = {}

    def add(self, caller: Caller) -> None:
        """A request makes a session. Its time begins when the request is answered (`keep`)."""
        self._handles[caller.tenant] = _Handle(caller)

    def use(self, tenant: str) -> None:
        """A request names a session that another request has made."""
        if (handle := self._handles.get(tenant)) is not None:
            handle.used = True
            self._arm(tenant, handle)

    def keep(self, tenant: str) -> None:
        """The client has the answer with the handle."""
        if (handle := self._handles.get(tenant)) is not None:
            self._arm(tenant, handle)

    def drop(self, tenant: str) -> None:
        """The client left before it had the answer: no client knows the handle."""
        if (handle := self._handles.pop(tenant, None)) is not None:
            self._spawn(destroy_all(self._service, handle.caller, tenant))

    def _arm(self, tenant: str, handle: _Handle) -> None:
        if handle.timer is not None:
            handle.timer.cancel()
        seconds = TTL if handle.used else self._unused
        handle.timer = asyncio.get_running_loop().call_later(seconds, self._end, tenant, handle)

    def _end(self, tenant: str, handle: _Handle) -> None:
        if self._handles.get(tenant) is not handle:
            return
        if handle.used:
            self._spawn(self._look(tenant, handle))
        else:
            self.drop(tenant)

    async def _look(self, tenant: str, handle: _Handle) -> None:
        """Core ends a session that was used, when no command runs in it. Here it is forgotten after that."""
        try:
            sessions = await self._service.sessions.list(handle.caller)
        except Fault:  # it is looked for again later
            self._arm(tenant, handle)
            return
        if any(each.tenant == tenant for each in sessions):
            self._arm(tenant, handle)
        else:
            self._handles.pop(tenant, None)

    def leave(self) -> None:
        """Another gateway serves these clients from now on: their sessions stay."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            if handle.timer is not None:
                handle.timer.cancel()

    async def close(self) -> None:
        handles, self._handles = self._handles, {}
        await asyncio.gather(*(self._close(tenant, handle) for tenant, handle in handles.items()))

    async def _close(self, tenant: str, handle: _Handle) -> None:
        if handle.timer is not None:
            handle.timer.cancel()
        with contextlib.suppress(Fault):  # the next daemon destroys it
            await destroy_all(self._service, handle.caller, tenant)
