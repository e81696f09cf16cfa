"""The HTTP+SSE transport, which came before Streamable HTTP: one long GET carries everything to the client, and POSTs
carry everything from it.

The first event of the GET is a token. A POST that sends it as `Mcp-Session-Id` has the answer in its body as well. The
second event is the token as an address, for clients of the protocol's first version; a POST there is answered with 202
and no body.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.message import SessionMessage

from k8e.doors.http.exchange import Exchange
from k8e.doors.mcp.errors import refuse_message
from k8e.doors.mcp.protocol import ProtocolServer

PING: Final = 15.0
JSON: Final = "application/json"
_HEADERS: Final = ((b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store"))


class SseTransport:
    def __init__(self, identity: str, token: str, server: ProtocolServer, path: str, ping: float = PING) -> None:
        """`identity`: of the key that opened it."""
        self.identity = identity
        self._token = token
        self._ping = ping
        self._server = server.server
        self._path = path
        self._incoming, self._read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self._waiting: dict[types.RequestId, asyncio.Future[types.JSONRPCMessage]] = {}

    async def serve(self, exchange: Exchange, gone: asyncio.Event) -> None:
        """Answers the GET until the client is gone."""
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        running = self._server.run(self._read, write, self._server.create_initialization_options())
        tasks: set[asyncio.Task[Any]] = {
            asyncio.create_task(running),
            asyncio.create_task(self._send(outgoing, exchange)),
            asyncio.create_task(gone.wait()),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for future in self._waiting.values():
                future.cancel()
            for end in (self._incoming, self._read, write, outgoing):
                end.close()

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage], exchange: Exchange) -> None:
        await exchange.start(200, _HEADERS)
        await _send_event(exchange, "session", self._token)
        await _send_event(exchange, "endpoint", f"{self._path}?session_id={self._token}")
        async with outgoing:
            while True:
                try:
                    with anyio.fail_after(self._ping):
                        message = (await outgoing.receive()).message
                except TimeoutError:
                    await exchange.send_piece(b": ping\n\n")
                    continue
                except anyio.EndOfStream:
                    return
                await _send_event(exchange, "message", _write(message))
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
                    future = self._waiting.pop(message.id, None)
                    if future is not None and not future.done():
                        future.set_result(message)

    async def post(self, exchange: Exchange, body: bytes, *, answers: bool) -> None:
        """`answers`: the answer of the POST carries the answer to its message."""
        status, message = await self._take(body, answers=answers)
        await exchange.send_bytes(status, _write(message).encode() if message else b"", JSON)

    async def _take(self, body: bytes, *, answers: bool) -> tuple[int, types.JSONRPCMessage | None]:
        try:
            message = types.jsonrpc_message_adapter.validate_json(body, by_name=False)
        except ValueError:
            return 400, refuse_message(types.PARSE_ERROR, "the body is no message")
        answer: asyncio.Future[types.JSONRPCMessage] | None = None
        if isinstance(message, types.JSONRPCRequest) and answers:
            if message.id in self._waiting:
                return 400, refuse_message(types.INVALID_REQUEST, "there is a request with this id already")
            answer = self._waiting[message.id] = asyncio.get_running_loop().create_future()
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._forget((message.params or {}).get("requestId"))
        try:
            await self._incoming.send(SessionMessage(message))
            return (202, None) if answer is None else (200, await answer)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return 404, refuse_message(types.INVALID_REQUEST, "the stream has ended")
        except asyncio.CancelledError:
            if answer is None or not answer.cancelled():
                raise
            return 202, None  # the request was cancelled, and has no answer

    def _forget(self, request_id: Any) -> None:
        if isinstance(request_id, str | int) and (future := self._waiting.pop(request_id, None)) is not None:
            future.cancel()


def _write(message: types.JSONRPCMessage) -> str:
    return message.model_dump_json(by_alias=True, exclude_unset=True)


async def _send_event(exchange: Exchange, event: str, data: str) -> None:
    """JSON contains no newlines."""
    await exchange.send_piece(f"event: {event}\ndata: {data}\n\n".encode())
