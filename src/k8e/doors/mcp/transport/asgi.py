"""Runs an ASGI application for one HTTP call: the SDK's Streamable HTTP is one."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from k8e.doors.mcp.transport.connection import HttpCall

SESSION: Final = b"mcp-session-id"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class AsgiCall:
    def __init__(self, call: HttpCall, note_start: Callable[[int, str], None] | None = None) -> None:
        """`note_start` gets the status of the response and its session, before the client does."""
        self._call = call
        self._note_start = note_start
        self._read = False
        self._complete = False
        self.status = 0
        target, _, query = call.head.target.partition(b"?")
        self.scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": call.head.http_version.decode("ascii"),
            "method": call.method,
            "scheme": "http",
            "path": "/" + "/".join(call.request.path),
            "raw_path": target,
            "root_path": "",
            "query_string": query,
            "headers": list(call.head.headers),
            "client": call.connection.peer_address,
            "server": call.connection.own_address,
        }

    @property
    def broken(self) -> bool:
        """Whether the client left before the end of the response."""
        return self._call.connection.gone.is_set() and not self._complete

    async def run(self, application: Application) -> None:
        await application(self.scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._call.connection.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        exchange = self._call.exchange
        with contextlib.suppress(ConnectionError):  # the application learns from `_receive` that the client left
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                self.status = message["status"]
                if self._note_start is not None:
                    self._note_start(self.status, headers.get(SESSION, b"").decode("latin-1"))
                await exchange.start(self.status, message["headers"])
                return
            self._complete = not message.get("more_body")
            if body := message.get("body"):
                await exchange.send_piece(body)
            if self._complete:
                await exchange.end_frames()
