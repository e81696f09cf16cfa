"""The forwarder: bytes go to the gateway that leads, as they are, and wait while there is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from k8e.doors.addresses import bind_port
from k8e.doors.grpc import forwarder
from k8e.doors.grpc.forwarder import Forwarder

MUCH = 8 << 20


class Leaders:
    """The leader's address, when there is one."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self.address = ""

    def appoint(self, address: str) -> None:
        self.address = address
        self._news.set()

    async def find(self) -> str:
        await self._news.wait()
        return self.address


@pytest.fixture
def leaders() -> Leaders:
    return Leaders()


@pytest.fixture
async def port(leaders: Leaders) -> AsyncIterator[int]:
    listener = bind_port("127.0.0.1", 0)
    number: int = listener.getsockname()[1]
    door = Forwarder(listener, leaders.find, most=20)
    door.open()
    yield number
    door.close()


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """A gateway that sends back what it gets, and ends when it gets nothing more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(data)
        await writer.drain()

    sending = asyncio.create_task(send())
    found = await reader.readexactly(len(data))
    await sending
    writer.close()
    return found


async def test_bytes_arrive_as_they_are(port: int, leaders: Leaders) -> None:
    async with echo() as address:
        leaders.appoint(address)
        for size in (1, 100_000, MUCH):
            data = os.urandom(size)
            assert await exchange(port, data) == data


async def test_a_client_waits_until_there_is_a_leader(port: int, leaders: Leaders) -> None:
    """With all that it sends meanwhile, of which only a part is kept."""
    data = os.urandom(MUCH)
    waiting = asyncio.create_task(exchange(port, data))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    async with echo() as address:
        leaders.appoint(address)
        assert await waiting == data


async def test_a_leader_that_has_just_ended_is_followed_by_the_next_one(port: int, leaders: Leaders) -> None:
    async with echo() as address:
        leaders.appoint(address)
    waiting = asyncio.create_task(exchange(port, b"hello"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with echo() as address:
        leaders.appoint(address)
        assert await waiting == b"hello"


async def test_a_connection_ends_with_its_leader(port: int, leaders: Leaders) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        writer.write(b"last words")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    leaders.appoint(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    assert await reader.read() == b"last words"
    writer.close()
    server.close()


async def test_without_a_leader_a_client_is_sent_away_in_the_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "HOLD", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_connections_are_bounded(port: int, leaders: Leaders, monkeypatch: pytest.MonkeyPatch) -> None:
    async with echo() as address:
        leaders.appoint(address)
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, writer in connections:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for _, each in connections:
            each.close()
        writer.close()
