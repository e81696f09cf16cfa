"""A session of Streamable HTTP, from its first request until it is deleted, abandoned or idle for too long.

Each has the SDK's session manager to itself, so that everything of a session ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Final

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.protocol import ProtocolServer
from k8e.doors.mcp.transport.asgi import AsgiCall, Message
from k8e.doors.mcp.transport.connection import HttpCall

BODY: Final = 16 << 20
IDLE: Final = 1800.0  # seconds without a request until a session ends
ABANDONED: Final = 10.0  # the same after a client broke off its last open request


class StreamableHttpSession:
    def __init__(
        self,
        identity: str,
        client: McpClient,
        note_open: Callable[[StreamableHttpSession], None],
        note_end: Callable[[StreamableHttpSession], None],
    ) -> None:
        """`identity`: of the key that opened it."""
        self.identity = identity
        self.client = client
        self.token = ""
        self._note_open = note_open
        self._note_end = note_end
        self._manager = make_manager(client)
        self._ended = asyncio.Event()
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        ready = asyncio.Event()
        self._running = asyncio.create_task(self._run(ready))
        await ready.wait()

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with self._manager.run():
                ready.set()
                await self._ended.wait()
        finally:
            self._note_end(self)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()

    def _start(self, status: int, token: str) -> None:
        if not self.token and status < 400 and token:
            self.token = token
            self._note_open(self)

    async def handle(self, call: HttpCall) -> None:
        if self._timer is not None:
            self._timer.cancel()
        asgi = AsgiCall(call, self._start)
        self._requests += 1
        try:
            await asgi.run(self._manager.handle_request)
        finally:
            self._requests -= 1
            if not self._requests and not self._ended.is_set():
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(ABANDONED if asgi.broken else IDLE, self.close)
        if asgi.broken and (request_id := find_request_id(call.body)) is not None:
            await self._cancel(asgi.scope, request_id)
        if call.method == "DELETE" and asgi.status == 200:
            self.close()

    async def _cancel(self, scope: Message, request_id: object) -> None:
        """Sends the SDK the cancellation that the client did not send. There is no event store from which the client
        could resume the stream, so the answer is of no use to it."""
        params = {"requestId": request_id}
        body = json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).encode()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        await self._manager.handle_request({**scope, "headers": headers}, receive, send)


def find_request_id(body: bytes) -> object:
    """None: the body is no request."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(body)
        return content.get("id") if isinstance(content, dict) and "method" in content else None
    return None


def make_manager(client: McpClient) -> StreamableHTTPSessionManager:
    """Hosts, origins and idle sessions are checked outside the SDK."""
    return StreamableHTTPSessionManager(
        app=ProtocolServer(client).server, session_idle_timeout=None, max_request_body_size=BODY, max_sessions=1
    )
