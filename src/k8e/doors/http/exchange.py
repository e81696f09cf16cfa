"""One HTTP request and its answer: wire.py turns bytes into events, the handlers of routes.py use them."""

from __future__ import annotations

import asyncio
import contextlib
import http
import os
import socket
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import h11

from k8e.core.model import MAX_MESSAGE, Caller
from k8e.doors.http import frames
from k8e.doors.http.errors import malformed, too_large, too_slow
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.http.wire import Head, Wire
from k8e.doors.request_memory import Allocation
from k8e.profiles.text import to_json

READ_SIZE = 256 << 10
_PARTS = 1000  # that one system call takes
BODY_PATIENCE = 30.0  # between two pieces of a body
WHOLE_PATIENCE = 300.0  # for all of one that is kept in memory
# Room in the kernel for live output, two chunks of it: what does not fit in is copied, and waits for its turn in the
# loop. The machine may allow less.
OUTPUT_ROOM = 512 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed head. Bytes that are not UTF-8 are lone surrogates, as in Python's own paths."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes] = field(repr=False)
    content_type: str

    @classmethod
    def of(cls, event: Head, *, strict: bool = True) -> Request:
        """`strict`: a query that is no list of `name=value` is refused, instead of read as far as it is one."""
        headers = dict(event.headers)
        target, _, query = event.target.decode("ascii", "replace").partition("?")
        if not target.startswith("/"):
            raise malformed("the request's target is not a path")
        try:
            pairs = (
                urllib.parse.parse_qsl(
                    query, keep_blank_values=True, strict_parsing=strict, errors="surrogateescape", max_num_fields=16
                )
                if query
                else ()
            )
        except ValueError as error:
            raise malformed("the query is malformed", str(error)) from error
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        parts = target[1:].split("/")
        if "%" in target:
            parts = [urllib.parse.unquote(part, errors="surrogateescape") for part in parts]
        return cls(
            event.method.decode("ascii"),
            tuple(parts),
            dict(pairs),
            headers,
            content_type.decode("ascii", "replace"),
        )

    def read_query(self, **defaults: str) -> tuple[str, ...]:
        """Reads these parameters of the query, in this order, and refuses others."""
        query = Fields(self.query)
        values = tuple(query.take_text(name, default) for name, default in defaults.items())
        query.finish()
        return values


def encode_fields(fields: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in fields.items()]


class Exchange:
    """A request whose body can be read and whose answer can be written, each at its own pace."""

    def __init__(
        self,
        caller: Caller,
        wire: Wire,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        allocation: Allocation,
    ) -> None:
        self.caller = caller
        self.allocation = allocation  # bytes of the body in memory
        self.status = 0  # of the answer, once it has begun
        self._framed = False
        self._client: socket.socket = writer.get_extra_info("socket")
        self._wire = wire
        self._reader = reader
        self._writer = writer

    @property
    def can_continue(self) -> bool:
        """Whether frames were begun and not ended. An error in the middle of anything else cuts the answer off."""
        return self._framed and self._wire.our_state is h11.SEND_BODY

    async def read_body(self, request: Request, limit: int = MAX_MESSAGE) -> bytes:
        """Reads the whole body. Raises HttpRefusal past the limit (before reading, if the length is announced), and
        Fault when there is no room in memory."""
        announced = request.headers.get(b"content-length", b"0")
        if int(announced) > limit:  # h11 let digits through and nothing else
            raise too_large(limit)
        if (whole := self._wire.take_body()) is not None:
            await self.allocation.add(len(whole))
            return whole
        body = bytearray()
        try:
            async with asyncio.timeout(WHOLE_PATIENCE):
                while (piece := await self.read_piece(BODY_PATIENCE)) is not None:
                    await self.allocation.add(len(piece))
                    body += piece
                    if len(body) > limit:
                        raise too_large(limit)
        except TimeoutError:
            raise too_slow() from None
        return bytes(body)

    def skip_body(self) -> None:
        """Drops a body that has arrived, so that the connection goes on after a refusal."""
        while self._wire.their_state is h11.SEND_BODY and self._wire.next_event() is not h11.NEED_DATA:
            pass

    async def read_fields(self, request: Request) -> Fields:
        """Reads the body, which is a JSON object."""
        return Fields(decode_object(await self.read_body(request)))

    async def read_piece(self, patience: float | None = None) -> bytes | None:
        """Reads the next part of the body; None after its end. `patience`: how long it waits for the client."""
        while True:
            event = self._wire.next_event()
            if event is h11.NEED_DATA:
                await self._send(self._wire.go_on())
                self._wire.receive_data(await self._read(patience))
            elif isinstance(event, h11.Data):
                return bytes(event.data)
            else:
                return None

    async def read_pieces(self, patience: float = BODY_PATIENCE) -> AsyncIterator[bytes]:
        """Reads the body, of any size, piece by piece."""
        while (piece := await self.read_piece(patience)) is not None:
            yield piece

    async def send_json(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        await self.send_bytes(status, to_json(body), "application/json", headers)

    async def send_bytes(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        kind = {"Content-Type": content_type} if body else {}
        fields = {**kind, "Content-Length": str(len(body)), **self._closing(), **(headers or {})}
        self.status = status
        head = self._wire.start(status, encode_fields(fields))
        await self._send(head, *self._wire.pack(body), self._wire.end())

    async def start_frames(self) -> None:
        self._framed = True
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, OUTPUT_ROOM)
        await self.start_pieces(frames.CONTENT_TYPE)

    async def start_pieces(self, content_type: str) -> None:
        """Begins an answer of unknown length. `end_frames` ends it."""
        await self.start(200, {b"Content-Type": content_type.encode()}.items())

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begins an answer. Without a length among the headers it is sent in chunks."""
        self.status = status
        fields = (*headers, *encode_fields(self._closing()))
        await self._send(self._wire.start(status, fields, http.HTTPStatus(status).phrase.encode()))

    async def send_piece(self, data: bytes) -> None:
        """Waits while the client does not read."""
        await self._send(*self._wire.pack(data))

    async def send_frame(self, kind: frames.FrameKind, *pieces: bytes) -> None:
        """Waits while the client does not read."""
        parts = self._wire.pack(frames.pack_header(kind, sum(map(len, pieces))), *pieces)
        if rest := self._write_at_once(parts):
            await self._send(*rest)

    async def end_frames(self, trailer: Mapping[str, str] | None = None) -> None:
        await self._send(self._wire.end(encode_fields(trailer or {})))

    async def wait_left(self, patience: float) -> None:
        """Returns when the client has closed the connection, or after a while. What it still sends is dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while await self._reader.read(READ_SIZE):
                    pass

    def _closing(self) -> Mapping[str, str]:
        """Ends the connection with the answer where the body was not read to its end: skipping the rest costs more."""
        unread = self._wire.their_state is not h11.DONE
        return {"Connection": "close"} if unread else {}

    def _write_at_once(self, parts: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Gives the socket what it takes, and returns the rest: asyncio would join the parts first, and copy them."""
        transport = self._writer.transport
        if len(parts) > _PARTS or transport.is_closing() or transport.get_write_buffer_size():
            return parts
        try:
            sent = os.writev(self._client.fileno(), parts)
        except OSError:  # it is full, or the client has left: asyncio finds out which
            return parts
        for index, part in enumerate(parts):
            if sent < len(part):
                return (memoryview(part)[sent:], *parts[index + 1 :])
            sent -= len(part)
        return ()

    async def _send(self, *parts: bytes | memoryview) -> None:
        if any(parts):
            self._writer.writelines(parts)
            await self._writer.drain()

    async def _read(self, patience: float | None) -> bytes:
        try:
            async with asyncio.timeout(patience):
                return await self._reader.read(READ_SIZE)
        except TimeoutError:
            raise too_slow() from None
