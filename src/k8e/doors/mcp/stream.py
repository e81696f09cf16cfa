"""A connection whose messages are lines of JSON, both ways: what `k8e sandbox-mcp` brings from its standard input and
takes to its standard output, in one request and its answer."""

from __future__ import annotations

import asyncio
import collections
import json
from typing import Protocol

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from k8e.core.errors import Fault
from k8e.core.model import MAX_MESSAGE
from k8e.doors.mcp.desk import Desk
from k8e.doors.request_memory import Allocation


class Pieces(Protocol):
    """Bytes both ways, cut anywhere."""

    async def read_piece(self) -> bytes | None:
        """None after the last."""

    async def send_piece(self, data: bytes) -> None: ...


class Lines:
    """Cuts what comes into lines. One that is too long is dropped to its end, and counts as None."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def size(self) -> int:
        """Of the line that has begun."""
        return self._size if self._size <= self._limit else 0

    def feed(self, data: bytes) -> list[bytes | None]:
        lines: list[bytes | None] = []
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._keep(end)
            lines.append(self._take())
        self._keep(rest)
        return lines

    def finish(self) -> list[bytes | None]:
        """A last line needs no end."""
        return [self._take()] if self._size else []

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._limit:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)

    def _take(self) -> bytes | None:
        line = b"".join(self._pieces) if self._size <= self._limit else None
        self._pieces, self._size = [], 0
        return line


class Stream:
    """After the end of its input a connection stays until all that was asked is answered: scripts write everything
    and wait. A client that is gone is noticed by the door, which cancels this."""

    def __init__(self, pieces: Pieces, desk: Desk, load: Allocation) -> None:
        self._load = load
        self._sizes: collections.Counter[types.RequestId] = collections.Counter()  # of what is not answered yet
        self._pieces = pieces
        self._desk = desk
        self._unanswered: collections.Counter[types.RequestId] = collections.Counter()
        self._settled = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None

    def close(self) -> None:
        """The daemon stops: whoever waits for an answer is told so."""
        if self._receiving is not None:
            self._receiving.cancel()

    async def serve(self) -> None:
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        server = self._desk.server
        self._receiving = asyncio.create_task(self._receive(incoming))
        sending = asyncio.create_task(self._send(outgoing))
        try:
            await server.run(read, write, server.create_initialization_options())
            await sending
        finally:
            self._receiving.cancel()
            sending.cancel()
            await asyncio.gather(self._receiving, sending, return_exceptions=True)
            self._load.free()

    async def _receive(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        async with incoming:
            try:
                await self._take_all(incoming)
            except Fault as fault:  # there is no room for more: what was asked before is still answered
                await self._write(refuse_bytes(fault))
            while self._unanswered:
                self._settled.clear()
                await self._settled.wait()

    async def _take_all(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        lines = Lines()
        while (piece := await self._pieces.read_piece()) is not None:
            await self._load.add(len(piece), long_lived=True)
            for line in lines.feed(piece):
                await self._take(line, incoming)
            # What is left is the line that has begun, and what is not answered yet.
            self._load.remove(self._load.size - lines.size - self._sizes.total())
        for line in lines.finish():
            await self._take(line, incoming)

    async def _take(self, line: bytes | None, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        if line is not None and not line.strip():
            return
        try:
            if line is None:
                raise ValueError(f"more than {MAX_MESSAGE} bytes")
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError as error:  # pydantic's own are among them
            await self._write(refuse_line(line, error))
            return
        if isinstance(message, types.JSONRPCRequest):
            self._unanswered[message.id] += 1
            self._sizes[message.id] += len(line)
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._settle((message.params or {}).get("requestId"))
        await incoming.send(SessionMessage(message))

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with outgoing:
            async for item in outgoing:
                await self._write(item.message)
                if isinstance(item.message, types.JSONRPCResponse | types.JSONRPCError):
                    self._settle(item.message.id)

    def _settle(self, request_id: types.RequestId | None) -> None:
        if request_id is not None:
            self._unanswered.pop(request_id, None)
            self._load.remove(self._sizes.pop(request_id, 0))
        self._settled.set()

    async def _write(self, message: types.JSONRPCMessage) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        await self._pieces.send_piece(line.encode() + b"\n")


def refuse_bytes(fault: Fault) -> types.JSONRPCError:
    data = {"code": fault.code, "detail": fault.detail, "hint": fault.hint, "retry_after": fault.retry_after}
    error = types.ErrorData(code=types.INVALID_REQUEST, message=fault.error, data=data)
    return types.JSONRPCError(jsonrpc="2.0", id=None, error=error)


def refuse_line(line: bytes | None, error: ValueError) -> types.JSONRPCError:
    """What is JSON and no message is another mistake than what is no JSON at all."""
    code, message = types.PARSE_ERROR, "Parse error"
    if line is None:
        message = f"Parse error: {error}"
    else:
        try:
            json.loads(line)
            code, message = types.INVALID_REQUEST, "Invalid request"
        except (ValueError, RecursionError):
            pass
    return types.JSONRPCError(jsonrpc="2.0", id=None, error=types.ErrorData(code=code, message=message))
