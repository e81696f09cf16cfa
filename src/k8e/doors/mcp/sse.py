"""The form of HTTP that came before Streamable HTTP: one long GET brings everything to the agent, POSTs come from it.

Its first event says by which token a POST belongs to it (`Mcp-Session-Id`), the second the same as an address, for
clients of the protocol's own first version. Who sends the header has the answer in the body as well; the address is
answered with 202 and nothing.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.message import SessionMessage
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k8e.doors.mcp.desk import Desk

PING: Final = 15.0
_HEADERS: Final = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


class EventStream:
    def __init__(self, token: str, desk: Desk, path: str, ping: float = PING) -> None:
        self._token = token
        self._ping = ping
        self._desk = desk
        self._path = path
        self._incoming, self._read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self._waiting: dict[types.RequestId, asyncio.Future[types.JSONRPCMessage]] = {}

    async def serve(self, receive: Receive, send: Send) -> None:
        """The GET, for as long as somebody reads it."""
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        server = self._desk.server
        serving = asyncio.create_task(server.run(self._read, write, server.create_initialization_options()))
        sending = asyncio.create_task(self._send(outgoing, send))
        leaving = asyncio.create_task(_wait_for_departure(receive))
        tasks: set[asyncio.Task[Any]] = {serving, sending, leaving}
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

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await _push(send, "session", self._token)
        await _push(send, "endpoint", f"{self._path}?session_id={self._token}")
        async with outgoing:
            while True:
                try:
                    with anyio.fail_after(self._ping):
                        message = (await outgoing.receive()).message
                except TimeoutError:
                    await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
                    continue
                except anyio.EndOfStream:
                    return
                await _push(send, "message", _write(message))
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
                    future = self._waiting.pop(message.id, None)
                    if future is not None and not future.done():
                        future.set_result(message)

    async def take(self, scope: Scope, receive: Receive, send: Send, *, answers: bool) -> None:
        """A POST. `answers`: its own answer carries the message's."""
        response = await self._take(await Request(scope, receive).body(), answers=answers)
        await response(scope, receive, send)

    async def _take(self, body: bytes, *, answers: bool) -> Response:
        try:
            message = types.jsonrpc_message_adapter.validate_json(body, by_name=False)
        except ValueError:
            return refuse(400, types.PARSE_ERROR, "the body is no message")
        answer: asyncio.Future[types.JSONRPCMessage] | None = None
        if isinstance(message, types.JSONRPCRequest) and answers:
            if message.id in self._waiting:
                return refuse(400, types.INVALID_REQUEST, "there is a request with this id already")
            answer = self._waiting[message.id] = asyncio.get_running_loop().create_future()
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._forget((message.params or {}).get("requestId"))
        try:
            await self._incoming.send(SessionMessage(message))
            if answer is None:
                return Response(status_code=202)
            return Response(_write(await answer), media_type="application/json")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return refuse(404, types.INVALID_REQUEST, "the stream has ended")
        except asyncio.CancelledError:
            if answer is None or not answer.cancelled():
                raise
            return Response(status_code=202)  # the request was cancelled, and has no answer

    def _forget(self, request_id: Any) -> None:
        if isinstance(request_id, str | int) and (future := self._waiting.pop(request_id, None)) is not None:
            future.cancel()


def refuse(status: int, code: int, message: str) -> Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return Response(json.dumps(body), status_code=status, media_type="application/json")


def _write(message: types.JSONRPCMessage) -> str:
    return message.model_dump_json(by_alias=True, exclude_unset=True)


async def _push(send: Send, event: str, data: str) -> None:
    """JSON has no line ends of its own."""
    body = f"event: {event}\ndata: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _wait_for_departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
