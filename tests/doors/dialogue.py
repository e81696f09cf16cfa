"""Talking to the door as a client would, byte by byte where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import h11

from k8e.doors.http.frames import Frame, FrameKind, FrameReader
from k8e.doors.http.handlers.files import FileHandlers
from k8e.doors.http.handlers.runs import RunHandlers
from k8e.doors.http.handlers.sessions import SessionHandlers
from k8e.doors.http.handlers.status import StatusHandlers
from k8e.doors.http.server import HttpServer, bind_socket
from tests.doors.stand_in import StandIn

JSON = {"Content-Type": "application/json"}
FRAMES = {"Content-Type": "application/x-k8e-frames", "Transfer-Encoding": "chunked"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.protocol = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, *events: h11.Event) -> None:
        for event in events:
            self.writer.write(self.protocol.send(event) or b"")
        await self.writer.drain()

    async def begin(self, method: str, target: str, headers: Mapping[str, str] | None = None) -> None:
        fields = {"Host": "localhost", **(headers or {})}
        await self.send(h11.Request(method=method, target=target, headers=list(fields.items())))

    async def ask(
        self, method: str, target: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A dict is sent as JSON, bytes as they are."""
        fields = dict(headers or {})
        content = b""
        if isinstance(body, dict):
            content = json.dumps(body).encode()
            fields = {**JSON, **fields}
        elif isinstance(body, bytes):
            content = body
        if body is not None:
            fields["Content-Length"] = str(len(content))
        await self.begin(method, target, fields)
        await self.send(h11.Data(data=content), h11.EndOfMessage())
        answer = await self.read_answer()
        if self.protocol.our_state is h11.DONE and self.protocol.their_state is h11.DONE:
            self.protocol.start_next_cycle()
        return answer

    async def read_event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self.protocol.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            self.protocol.receive_data(await self.reader.read(65536))

    async def read_answer(self) -> Answer:
        head = await self.read_head()
        body = b""
        while isinstance(event := await self.read_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        return Answer(head.status_code, decode(head.headers) | decode(event.headers), body)

    async def read_head(self) -> h11.Response:
        while isinstance(event := await self.read_event(), h11.InformationalResponse):
            pass
        assert isinstance(event, h11.Response)
        return event

    async def read_frames(self) -> AsyncIterator[Frame]:
        reader = FrameReader(1 << 24)
        while isinstance(event := await self.read_event(), h11.Data):
            for frame in reader.feed(bytes(event.data)):
                yield frame
        assert reader.between_frames


def decode(headers: h11._headers.Headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def pack_frame(kind: FrameKind, data: bytes) -> h11.Data:
    return h11.Data(data=bytes((kind,)) + len(data).to_bytes(4, "big") + data)


@dataclass
class House:
    """An open door with a stand-in behind it."""

    service: StandIn
    path: Path
    door: HttpServer

    async def dial(self) -> Client:
        return Client(*await asyncio.open_unix_connection(str(self.path)))

    async def ask(
        self, method: str, target: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        async with await self.dial() as client:
            return await client.ask(method, target, body, headers)

    async def converse(self, data: bytes) -> bytes:
        """Sends exactly that, finishes sending, and reads to the end."""
        async with await self.dial() as client:
            with contextlib.suppress(ConnectionError):
                client.writer.write(data)
                client.writer.write_eof()
                await client.writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := await client.reader.read(65536):
                    answer += piece
            return answer

    async def make_session(self) -> str:
        answer = await self.ask("POST", "/v1/sessions", {})
        assert answer.status == 201
        return str(answer.json["session_id"])


@contextlib.asynccontextmanager
async def open_house(folder: Path, **settings: Any) -> AsyncIterator[House]:
    service = StandIn()
    status = StatusHandlers(service, lambda: "k8e_sessions 0\n")
    handlers = (status, SessionHandlers(service), RunHandlers(service), FileHandlers(service.files))
    door = HttpServer(service, handlers, **settings)
    path = folder / "k8e.sock"
    await door.open(bind_socket(path))
    try:
        yield House(service, path, door)
    finally:
        unfinished = await door.close(grace=10)
        assert not unfinished
        assert all(process.process.returncode is not None for process in service.processes), "a command was left behind"
