"""The stdio transport: messages are lines of JSON. The bridge (`k8e sandbox-mcp`) carries them between its pipes and
the daemon, in one HTTP request or one gRPC call."""

from __future__ import annotations

import asyncio
import collections
from typing import Protocol

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from k8e.core.errors import Fault
from k8e.core.model import MAX_MESSAGE
from k8e.doors.mcp.bridge import AGAIN, MARK, Bridge
from k8e.doors.mcp.errors import refuse_bytes, refuse_line, refuse_stopped
from k8e.doors.mcp.protocol import ProtocolServer
from k8e.doors.request_memory import Allocation


class ByteStream(Protocol):
    """Bytes in both directions, in pieces of any size."""

    async def read_piece(self) -> bytes | None:
        """None after the last."""

    async def send_piece(self, data: bytes) -> None: ...


class LineSplitter:
    """Splits bytes into lines. A line that is too long is dropped to its end, and given as None."""

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held of the line that has begun."""
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
        """The last line needs no newline."""
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


class StdioTransport:
    """After the end of its input a connection stays until all requests are answered: a script writes everything and
    waits. When the client disconnects, the door cancels the task."""

    def __init__(
        self, stream: ByteStream, server: ProtocolServer, allocation: Allocation, bridge: Bridge | None = None
    ) -> None:
        self._stream = stream
        self._bridge = bridge
        self._lines = LineSplitter()
        self._server = server.server
        self._note_restart = server.note_restart
        self._allocation = allocation
        # Requests that are not answered yet, and their bytes.
        self._unanswered: collections.Counter[types.RequestId] = collections.Counter()
        self._sizes: collections.Counter[types.RequestId] = collections.Counter()
        self._settled = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def close(self) -> None:
        """The daemon stops: each request that was read and is not answered gets an error. The bridge sends those that
        were not read to the next daemon."""
        self._stopped.set()
        if self._receiving is not None:
            self._receiving.cancel()

    async def serve(self) -> None:
        if self._stopped.is_set():
            return  # the bridge sends everything to the next daemon
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        self._receiving = asyncio.create_task(self._receive(incoming))
        sending = asyncio.create_task(self._send(outgoing))
        try:
            await self._server.run(read, write, self._server.create_initialization_options())
            await sending
            if self._stopped.is_set():
                for request_id in list(self._unanswered):
                    await self._write(refuse_stopped(request_id))
        finally:
            self._receiving.cancel()
            sending.cancel()
            await asyncio.gather(self._receiving, sending, return_exceptions=True)
            self._allocation.free()

    async def _receive(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        async with incoming:
            try:
                while not (self._bridge and self._bridge.ended) and await self._take_piece(incoming):
                    pass
                for line in self._lines.finish():
                    await self._take(line, incoming)
            except Fault as fault:  # no memory for more: earlier requests are still answered
                await self._write(refuse_bytes(fault))
            answering = asyncio.create_task(self._take_answers(incoming))
            try:
                while self._unanswered:
                    self._settled.clear()
                    await self._settled.wait()
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    async def _take_answers(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Requests of a client that sends no more may still need answers of the bridge."""
        if self._bridge is not None:
            try:
                while self._bridge.ended and await self._take_piece(incoming):
                    pass
            finally:
                self._bridge.close()

    async def _take_piece(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> bool:
        """False at the end of the stream."""
        piece = await self._stream.read_piece()
        if piece is None:
            return False
        await self._allocation.add(len(piece), long_lived=True)
        for line in self._lines.feed(piece):
            await self._take(line, incoming)
        # The line that has begun and the unanswered requests stay in memory.
        self._allocation.remove(self._allocation.size - self._lines.size - self._sizes.total())
        return True

    async def _take(self, line: bytes | None, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        if line is not None and not line.strip():
            return
        if line is not None and line.startswith(AGAIN):
            self._note_restart()
            return
        if line is not None and self._bridge is not None and line.startswith(MARK):
            self._bridge.take(line)
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
                message = item.message
                if self._stopped.is_set() and isinstance(message, types.JSONRPCError) and message.id is not None:
                    message = refuse_stopped(message.id)
                await self._write(message)
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                    self._settle(message.id)

    def _settle(self, request_id: types.RequestId | None) -> None:
        if request_id is not None:
            self._unanswered.pop(request_id, None)
            self._allocation.remove(self._sizes.pop(request_id, 0))
        self._settled.set()

    async def _write(self, message: types.JSONRPCMessage) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        await self._stream.send_piece(line.encode() + b"\n")
