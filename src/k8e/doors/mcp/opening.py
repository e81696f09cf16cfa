"""When the SDK is loaded: some time after the daemon is ready, or when the first agent comes. It takes a second or two,
and so it happens in a thread; nothing heavy is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from k8e.core.errors import Fault
from k8e.core.journal import format_event
from k8e.doors import specs
from k8e.doors.exchange import Exchange, Request
from k8e.doors.shapes import encode

if TYPE_CHECKING:
    from k8e.doors.mcp.guest import Service
    from k8e.doors.mcp.listener import Listener
    from k8e.doors.mcp.stream import Stream

PATIENCE: Final = 5.0  # before it is loaded though nobody has come
JSON_LINES: Final = "application/x-ndjson"
LITTLE: Final = 64 << 10

log = logging.getLogger("k8e.doors.mcp")


class Opening:
    """Implements `routes.Agents`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loading = asyncio.Lock()
        self._loaded = False
        self._open: set[Stream | Listener] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fewer = asyncio.Event()

    async def prepare(self, seconds: float = PATIENCE) -> None:
        from k8e.doors.mcp.guest import reclaim

        try:
            await reclaim(self._service)
        except Fault as fault:
            log.warning("%s", format_event(fault.code, {"cause": fault.error, "detail": fault.detail}))
        await asyncio.sleep(seconds)
        await self._load()

    async def _load(self) -> None:
        async with self._loading:
            if not self._loaded:
                await asyncio.to_thread(load_sdk)
                self._loaded = True

    async def connect(self, exchange: Exchange, request: Request) -> None:
        """One agent, for as long as its lines come."""
        query = specs.Fields(request.query)
        tenant = query.take_text("tenant_id")
        query.finish()
        await self._load()
        from k8e.doors.mcp.desk import Desk
        from k8e.doors.mcp.guest import Guest
        from k8e.doors.mcp.stream import CONTENT_TYPE, Stream

        guest = Guest(self._service, exchange.caller, tenant, known=True)
        stream = Stream(exchange, Desk(guest))
        await self._service.sessions(guest.caller)  # a tenant that cannot be is refused here
        await exchange.start_pieces(CONTENT_TYPE)
        self._open.add(stream)
        try:
            await stream.serve()
            await exchange.end_frames()
        finally:
            self._open.discard(stream)
            self._fewer.set()
            self._spawn(guest.leave())

    async def listen(self, exchange: Exchange, request: Request) -> None:
        """Many agents, on an address, for as long as the request is held open."""
        fields = specs.Fields(specs.decode_object(await exchange.read_body(request, LITTLE)))
        address, tenant = fields.take_text("http_addr"), fields.take_text("tenant_id")
        fields.finish()
        await self._load()
        from k8e.doors.mcp.guest import Guest
        from k8e.doors.mcp.listener import Listener, bind, name_url
        from k8e.doors.mcp.reception import Reception

        guest = Guest(self._service, exchange.caller, tenant, known=False)
        await self._service.sessions(guest.caller)
        bound = bind(address, exchange.caller)
        port = bound.getsockname()[1]
        listener = Listener(Reception(self._service, exchange.caller, tenant, port, self._spawn), bound)
        self._open.add(listener)
        try:
            await exchange.start_pieces(JSON_LINES)
            await exchange.send_piece(encode({"listening": name_url(bound)}))
            await listener.serve()
            await exchange.end_frames()
        finally:
            self._open.discard(listener)
            self._fewer.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside a connection that has ended, or is being cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fewer.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", format_event("not_left_well", {"cause": repr(error)}))

    async def close(self, grace: float) -> None:
        """Ends all connections, and what ends with them."""
        for each in list(self._open):
            each.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._open or self._tasks:
                    self._fewer.clear()
                    await self._fewer.wait()


def load_sdk() -> None:
    import k8e.doors.mcp.listener
    import k8e.doors.mcp.stream  # noqa: F401 - and with them everything

    # They name what they serve, and names of connections are secrets.
    for name in ("mcp", "uvicorn", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.ERROR)
