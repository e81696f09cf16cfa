"""Images through the HTTP door: the progress that is told, and a caller that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from k8e.core.contract import ImageService
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, NamedImage
from k8e.doors.http.frames import Frame, FrameKind, FrameReader
from k8e.doors.http.handlers.images import ImageHandlers
from k8e.doors.http.server import HttpServer, bind_socket
from k8e.engine.images import Credentials, Progress, Report
from tests.doors.stand_in import StandIn

IMAGE = NamedImage("demo:1", "sha256:" + "0" * 64, 10, 0, "", 1.5, 2.5)
SHAPE = {
    "image": "demo:1",
    "digest": IMAGE.digest,
    "size": 10,
    "owner": 0,
    "tenant_id": "",
    "added": 1.5,
    "last_used": 2.5,
}


@dataclass
class Keeper:
    """Implements `ImageService`: does nothing, and says what it was asked."""

    asked: list[object] = field(default_factory=list)
    fault: Fault | None = None  # after the first progress
    hold: asyncio.Event | None = None  # waited for in the middle
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def pull(
        self, caller: Caller, name: str, credentials: Credentials | None, report: Report, tenant: str = ""
    ) -> NamedImage:
        if name == "-v/:/host":
            raise Fault(Kind.INVALID, "invalid_argument", "image: no", hint="another", field="image")
        self.asked.append((name, credentials and (credentials.username, credentials.password)))
        try:
            report(Progress("downloading", 1, 2))
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            if self.fault is not None:
                raise self.fault
            return IMAGE
        finally:
            self.ended.set()

    async def add(
        self, caller: Caller, pieces: AsyncIterable[bytes], name: str, report: Report, tenant: str = ""
    ) -> NamedImage:
        self.asked.append((name, b"".join([piece async for piece in pieces])))
        return IMAGE

    async def build_base(self, caller: Caller, report: Report) -> NamedImage:
        return IMAGE

    async def list(self, caller: Caller, name: str = "") -> Sequence[NamedImage]:
        return [IMAGE] if name in ("", "demo:1") else []

    async def remove(self, caller: Caller, name: str, tenant: str = "") -> int:
        self.asked.append(name)
        return 7

    async def prune(self, caller: Caller, unused_for: float = 0, tenant: str = "") -> tuple[Sequence[str], int]:
        self.asked.append(unused_for)
        return ["demo:1"], 8


def _check(keeper: Keeper) -> ImageService:
    return keeper


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
async def place(keeper: Keeper, tmp_path: Path) -> AsyncIterator[Path]:
    door = HttpServer(StandIn(), [ImageHandlers(keeper)])
    await door.open(bind_socket(tmp_path / "d.sock"))
    yield tmp_path / "d.sock"
    await door.close(5.0)


async def ask(place: Path, head: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(place)
    text = f"{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body:
        text += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    writer.write(text.encode() + b"\r\n" + body)
    answer = await reader.read()
    writer.close()
    first, _, content = answer.partition(b"\r\n\r\n")
    if b"chunked" in first:
        content = unchunk(content)
    return int(first.split()[1]), content


def unchunk(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        number = int(size, 16)
        whole, data = whole + data[:number], data[number + 2 :]
    return whole


def frames(content: bytes) -> list[Frame]:
    return list(FrameReader(1 << 20).feed(content))


async def test_progress_then_the_image(place: Path, keeper: Keeper) -> None:
    body = {"image": "demo:1", "credentials": {"username": "u", "password": "p"}}
    status, content = await ask(place, "POST /v1/images/pull", json.dumps(body).encode())
    got = [(frame.kind, json.loads(frame.data)) for frame in frames(content)]
    assert (status, got[-1]) == (200, (FrameKind.RESULT, SHAPE))
    assert got[:-1] == [(FrameKind.PROGRESS, {"step": "downloading", "done": 1, "total": 2})]
    assert keeper.asked == [("demo:1", ("u", "p"))]


async def test_what_is_refused_at_once_has_a_status(place: Path) -> None:
    status, content = await ask(place, "POST /v1/images/pull", b'{"image": "-v/:/host"}')
    assert (status, json.loads(content)["field"]) == (400, "image")
    for body in (b'{"image": 1}', b'{"image": "x", "more": 1}', b'{"image": "x", "credentials": {"token": "t"}}', b"["):
        assert (await ask(place, "POST /v1/images/pull", body))[0] == 400


async def test_what_fails_later_is_the_last_frame(place: Path, keeper: Keeper) -> None:
    keeper.fault = Fault(Kind.DENIED, "image_unauthorized", "no", hint="log in")
    status, content = await ask(place, "POST /v1/images/pull", b'{"image": "x"}')
    last = frames(content)[-1]
    assert (status, last.kind) == (200, FrameKind.ERROR)
    assert json.loads(last.data) == {"error": "no", "detail": "", "code": "image_unauthorized", "hint": "log in"}


async def test_who_goes_away_ends_it(place: Path, keeper: Keeper) -> None:
    keeper.hold = asyncio.Event()
    reader, writer = await asyncio.open_unix_connection(place)
    body = b'{"image": "x"}'
    head = b"POST /v1/images/pull HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert await reader.read(10)
    writer.close()
    async with asyncio.timeout(30):
        await keeper.ended.wait()


async def test_an_archive_is_taken_as_it_comes(place: Path, keeper: Keeper) -> None:
    content = bytes(range(256)) * 4000
    status, answer = await ask(place, "POST /v1/images/import?name=mine%3A1", content, kind="application/octet-stream")
    assert (status, json.loads(frames(answer)[-1].data)) == (200, SHAPE)
    assert keeper.asked == [("mine:1", content)]
    status, _ = await ask(place, "POST /v1/images/import", b"{}")
    assert status == 415, "a form could send that"


async def test_the_others(place: Path, keeper: Keeper) -> None:
    assert json.loads((await ask(place, "GET /v1/images"))[1]) == {"images": [SHAPE]}
    assert json.loads((await ask(place, "GET /v1/images?name=other"))[1]) == {"images": []}
    removed = json.loads((await ask(place, "DELETE /v1/images?name=localhost%3A5000%2Fx%3A1"))[1])
    assert removed == {"ok": True, "image": "localhost:5000/x:1", "freed": 7}
    pruned = json.loads((await ask(place, "POST /v1/images/prune", b'{"unused_for": 60}'))[1])
    assert pruned == {"ok": True, "removed": ["demo:1"], "freed": 8}
    assert keeper.asked == ["localhost:5000/x:1", 60.0]
    assert json.loads(frames((await ask(place, "POST /v1/images/base", b"{}"))[1])[-1].data) == SHAPE
    with contextlib.suppress(ConnectionError):
        assert (await ask(place, "PUT /v1/images"))[0] == 405
