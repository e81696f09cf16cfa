"""A connection of Streamable HTTP, from its first request until it is taken back, broken off or forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Final

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from k8e.doors.mcp.desk import Desk
from k8e.doors.mcp.entrance import Visitor
from k8e.doors.mcp.guest import Guest

BODY: Final = 16 << 20
IDLE: Final = 1800.0  # without a request, before a connection counts as over
ABANDONED: Final = 10.0  # the same after a client broke off and left no other request open
SESSION: Final = "mcp-session-id"


class Visit:
    def __init__(
        self, visitor: Visitor, guest: Guest, know: Callable[[Visit], None], forget: Callable[[Visit], None]
    ) -> None:
        self.visitor = visitor
        self.guest = guest
        self.token = ""
        self._know = know
        self._manager = make_manager(guest)
        self._forget = forget
        self._over = asyncio.Event()
        self._open = 0
        self._patience: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        ready = asyncio.Event()
        self._running = asyncio.create_task(self._run(ready))
        await ready.wait()

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with self._manager.run():
                ready.set()
                await self._over.wait()
        finally:
            self._forget(self)

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._over.set()

    def _start(self, status: int, token: str) -> None:
        if not self.token and status < 400 and token:
            self.token = token
            self._know(self)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._patience is not None:
            self._patience.cancel()
        watch = Watch(receive, send, self._start)
        self._open += 1
        try:
            await self._manager.handle_request(scope, watch.receive, watch.send)
        finally:
            self._open -= 1
            if not self._open and not self._over.is_set():
                loop = asyncio.get_running_loop()
                self._patience = loop.call_later(ABANDONED if watch.broken else IDLE, self.close)
        if watch.broken and watch.request_id is not None:
            await self._cancel(scope, watch.request_id)
        if scope["method"] == "DELETE" and watch.status == 200:
            self.close()

    async def _cancel(self, scope: Scope, request_id: object) -> None:
        """Nobody can come back for the answer, since nothing is kept to be sent again: then nothing has to run for it.
        Told to the SDK as the client would have done."""
        params = {"requestId": request_id}
        body = json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).encode()
        pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return pieces.pop() if pieces else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        await self._manager.handle_request({**scope, "headers": headers}, receive, send)


class Watch:
    """Looks at a request as it passes: which it is, how it is answered, and whether the client stays for it."""

    def __init__(self, receive: Receive, send: Send, start: Callable[[int, str], None]) -> None:
        self.status = 0
        self._start = start
        self.broken = False
        self.request_id: object = None
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._finished = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.broken |= not self._finished
        elif len(self._body) < BODY:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                with contextlib.suppress(ValueError, RecursionError):
                    content = json.loads(self._body) if self._body else None
                    self.request_id = content.get("id") if isinstance(content, dict) and "method" in content else None
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._start(self.status, Headers(raw=message["headers"]).get(SESSION, ""))
        elif not message.get("more_body"):
            self._finished = True
        await self._send(message)


def make_manager(guest: Guest) -> StreamableHTTPSessionManager:
    """Hosts and origins are examined before; how long it waits is ours to say."""
    return StreamableHTTPSessionManager(
        app=Desk(guest).server, session_idle_timeout=None, max_request_body_size=BODY, max_sessions=1
    )
