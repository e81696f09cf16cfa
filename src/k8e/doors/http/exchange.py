"""One HTTP request and its answer: h11 turns bytes into events, the handlers of routes.py use them."""

from __future__ import annotations

import asyncio
import contextlib
import http
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

import h11

from k8e.core.model import MAX_MESSAGE, Caller
from k8e.doors.http import frames
from k8e.doors.http.errors import malformed, too_large, too_slow
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.request_memory import Allocation
from k8e.profiles.text import to_json

READ_SIZE = 256 << 10
BODY_PATIENCE = 30.0  # between two pieces of a body
WHOLE_PATIENCE = 300.0  # for all of one that is kept in memory


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed head. Bytes that are not UTF-8 are lone surrogates, as in Python's own paths."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes] = field(repr=False)
    content_type: str

    @classmethod
    def of(cls, event: h11.Request, *, strict: bool = True) -> Request:
        """`strict`: a query that is no list of `name=value` is refused, instead of read as far as it is one."""
        headers = dict(event.headers)
        target, _, query = event.target.decode("ascii", "replace").partition("?")
        if not target.startswith("/"):
            raise malformed("the request's target is not a path")
        try:
            pairs = urllib.parse.parse_qsl(
                query,
                keep_blank_values=True,
                strict_parsing=bool(query) and strict,
                errors="surrogateescape",
                max_num_fields=16,
            )
        except ValueError as error:
            raise malformed("the query is malformed", str(error)) from error
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        return cls(
            event.method.decode("ascii"),
            tuple(urllib.parse.unquote(part, errors="surrogateescape") for part in target[1:].split("/")),
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


class Exchange:
    """A request whose body can be read and whose answer can be written, each at its own pace."""

    def __init__(
        self,
        caller: Caller,
        protocol: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        allocation: Allocation,
    ) -> None:
        self.caller = caller
        self.allocation = allocation  # bytes of the body in memory
        self.status = 0  # of the answer, once it has begun
        self._framed = False
        self._protocol = protocol
        self._reader = reader
        self._writer = writer

    @property
    def can_continue(self) -> bool:
        """Whether frames were begun and not ended. An error in the middle of anything else cuts the answer off."""
        return self._framed and self._protocol.our_state is h11.SEND_BODY

    async def read_body(self, request: Request, limit: int = MAX_MESSAGE) -> bytes:
        """Reads the whole body. Raises HttpRefusal past the limit (before reading, if the length is announced), and
        Fault when there is no room in memory."""
        announced = request.headers.get(b"content-length", b"0")
        if int(announced) > limit:  # h11 let digits through and nothing else
            raise too_large(limit)
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
        while self._protocol.their_state is h11.SEND_BODY and self._protocol.next_event() is not h11.NEED_DATA:
            pass

    async def read_fields(self, request: Request) -> Fields:
        """Reads the body, which is a JSON object."""
        return Fields(decode_object(await self.read_body(request)))

    async def read_piece(self, patience: float | None = None) -> bytes | None:
        """Reads the next part of the body; None after its end. `patience`: how long it waits for the client."""
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                if self._protocol.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._protocol.receive_data(await self._read(patience))
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
        head = self._protocol.send(h11.Response(status_code=status, headers=list(fields.items())))
        parts = self._protocol.send_with_data_passthrough(h11.Data(data=body)) or []
        end = self._protocol.send(h11.EndOfMessage())
        self._writer.write(b"".join(part for part in (head, *parts, end) if part))
        await self._writer.drain()

    async def start_frames(self) -> None:
        self._framed = True
        await self.start_pieces(frames.CONTENT_TYPE)

    async def start_pieces(self, content_type: str) -> None:
        """Begins an answer of unknown length. `end_frames` ends it."""
        await self.start(200, {b"Content-Type": content_type.encode()}.items())

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begins an answer. Without a length among the headers h11 sends it in chunks."""
        self.status = status
        closing = [(b"Connection", b"close")] if self._closing() else []
        reason = http.HTTPStatus(status).phrase.encode()
        await self._send(h11.Response(status_code=status, headers=[*headers, *closing], reason=reason))

    async def send_piece(self, data: bytes) -> None:
        """Waits while the client does not read."""
        await self._send(h11.Data(data=data))

    async def send_frame(self, kind: frames.FrameKind, data: bytes) -> None:
        """Waits while the client does not read."""
        await self._send(h11.Data(data=frames.pack_header(kind, len(data)) + data))

    async def end_frames(self, trailer: Mapping[str, str] | None = None) -> None:
        await self._send(h11.EndOfMessage(headers=list((trailer or {}).items())))

    async def wait_left(self, patience: float) -> None:
        """Returns when the client has closed the connection, or after a while. What it still sends is dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while await self._reader.read(READ_SIZE):
                    pass

    def _closing(self) -> Mapping[str, str]:
        """Ends the connection with the answer where the body was not read to its end: skipping the rest costs more."""
        unread = self._protocol.their_state is not h11.DONE
        return {"Connection": "close"} if unread else {}

    async def _send(self, event: h11.Event) -> None:
        data = self._protocol.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def _read(self, patience: float | None) -> bytes:
        try:
            async with asyncio.timeout(patience):
                return await self._reader.read(READ_SIZE)
        except TimeoutError:
            raise too_slow() from None
