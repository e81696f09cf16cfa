"""Strangers at an address that everybody can reach: who says nothing is not waited for, and too many are not let in."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from k8e.core.keys import Keys
from k8e.core.model import Caller
from k8e.doors.mcp.doorkeeper import MOST, PATIENCE, Doorkeeper
from k8e.doors.mcp.entrance import Entrance, House
from k8e.doors.mcp.listener import Listener, bind
from k8e.doors.mcp.reception import Reception
from tests.core.rig import open_rig

ROOT = Caller(0)


class Hasty(Doorkeeper):
    patience = 0.05
    most = 3


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    async with open_rig(tmp_path) as rig:
        bound = bind(ipaddress.ip_address("127.0.0.1"), 0, ROOT)
        port = bound.getsockname()[1]
        house = House(port, ("127.0.0.1",), secure=False, host=ROOT)
        reception = Reception(rig.service, Entrance(house, Keys(tmp_path / "identity")), "", spawn)
        listener = Listener(reception, bound, None, Hasty)
        serving = asyncio.create_task(listener.serve())
        yield port
        listener.close()
        await serving
        await asyncio.gather(*spawned)


@pytest.mark.parametrize(
    "said", [b"", b"POST /mcp HTTP/1.1\r\nHost: ", b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\nGET /"]
)
async def test_who_does_not_finish_asking_is_not_waited_for(port: int, said: bytes) -> None:
    assert (PATIENCE, MOST) == (10.0, 2000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 421")
    writer.close()


async def open_stream(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert b"200 OK" in await reader.readuntil(b"event: session")
    return reader, writer


async def be_turned_away(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_who_is_served_stays_and_too_many_are_not_let_in(port: int) -> None:
    streams = [await open_stream(port)]
    await be_turned_away(port)  # who came later, said nothing, and was waited for in vain
    streams += [await open_stream(port) for _ in range(Hasty.most - 1)]
    await be_turned_away(port)  # at once
    for reader, writer in streams:
        assert not reader.at_eof()
        writer.close()
