"""Unauthenticated peers at an address of MCP over HTTP: they have little time, and few connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from k8e.core.access.keys import Admission, Keys
from k8e.core.model import Caller
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.mcp.authentication import Authenticator, ListenAddress
from k8e.doors.mcp.server import PATIENCE, McpServer, bind
from k8e.doors.mcp.transport.connection import HttpCall
from k8e.doors.mcp.transport.http import HttpTransport
from k8e.doors.request_memory import RequestMemory
from tests.core.rig import open_rig

ROOT = Caller(0)


@pytest.fixture
async def connection_limits() -> ConnectionLimits:
    return ConnectionLimits(100, unauthenticated=4, each=3)


@pytest.fixture
async def port(tmp_path: Path, connection_limits: ConnectionLimits) -> AsyncIterator[int]:
    async with open_address(tmp_path, connection_limits, patience=0.05) as port:
        yield port


@contextlib.asynccontextmanager
async def open_address(
    folder: Path,
    connection_limits: ConnectionLimits,
    *,
    patience: float = PATIENCE,
    memory: RequestMemory | None = None,
    authenticator: type[Authenticator] = Authenticator,
) -> AsyncIterator[int]:
    spawned: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        spawned.append(asyncio.create_task(work))

    async with open_rig(folder) as rig:
        listener = bind(ipaddress.ip_address("127.0.0.1"), 0, ROOT)
        port = listener.getsockname()[1]
        address = ListenAddress(port, ("127.0.0.1",), secure=False, user=ROOT)
        transport = HttpTransport(
            rig.service, authenticator(address, Keys(folder / "identity")), "", spawn, memory or RequestMemory()
        )
        server = McpServer(transport, listener, None, connection_limits, patience)
        serving = asyncio.create_task(server.serve())
        yield port
        server.close()
        await serving
        await asyncio.gather(*spawned)
    limits = connection_limits
    held = (limits._used, limits._unauthenticated.count, limits._connections.total())
    assert held == (0, 0, 0), "every place was given back"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /mcp HTTP/1.1\r\nHost: ", b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\nGET /"]
)
async def test_a_peer_that_does_not_finish_its_request_is_cut_off(port: int, sent: bytes) -> None:
    assert PATIENCE == 10.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 421")
    writer.close()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, address: str = "127.0.0.1") -> Stream:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def open_stream(port: int) -> Stream:
    reader, writer = await connect(port)
    writer.write(f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert b"200 OK" in await reader.readuntil(b"event: session")
    return reader, writer


async def is_ended(stream: Stream) -> bool:
    """Waits for the end, a minute at most."""
    with contextlib.suppress(ConnectionError):
        try:
            async with asyncio.timeout(60):
                return await stream[0].read() == b""
        except TimeoutError:
            return False
    return True


async def test_unauthenticated_peers_are_few_and_keep_no_known_client_out(tmp_path: Path) -> None:
    """Many more silent connections than there are places, from several addresses, while known clients come and stay."""
    connection_limits = ConnectionLimits(100, unauthenticated=4, each=3)
    async with open_address(tmp_path, connection_limits) as port:
        streams = [await open_stream(port) for _ in range(6)]
        silent = [await connect(port, f"127.0.0.{number % 5 + 2}") for number in range(50)]
        streams += [await open_stream(port) for _ in range(6)]
        assert all([await is_ended(one) for one in silent[:40]]), "the newest push out the oldest"
        assert not any(reader.at_eof() for reader, _ in streams)
        assert connection_limits._unauthenticated.count <= 4
        for _, writer in (*streams, *silent):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_peer_that_is_refused_does_not_stay(tmp_path: Path) -> None:
    connection_limits = ConnectionLimits(100, authentication=0.5)
    async with open_address(tmp_path, connection_limits) as port:
        reader, writer = await connect(port)
        question = f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer k8e_x\r\n\r\n".encode()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(60):
                writer.write(question)
                while line := await reader.readline():
                    assert b" 401 " in line
                    await reader.readuntil(b"}\n")
                    writer.write(question)
        writer.close()


async def test_all_connections_together_leave_descriptors_for_others(tmp_path: Path) -> None:
    connection_limits = ConnectionLimits(8, unauthenticated=4, shares=1)
    async with open_address(tmp_path, connection_limits) as port:
        streams = [await open_stream(port) for _ in range(8)]
        late = await connect(port)
        assert await is_ended(late), "there is no unauthenticated peer in whose place it could come"
        late[1].close()
        streams[0][1].close()
        while connection_limits._used == 8:
            await asyncio.sleep(0.01)
        streams.append(await open_stream(port))
        for _, writer in streams:
            writer.close()


async def test_a_client_that_leaves_while_it_is_authenticated_takes_no_place(tmp_path: Path) -> None:
    connection_limits = ConnectionLimits(100)
    found, gone = asyncio.Event(), asyncio.Event()

    class Slow(Authenticator):
        async def authenticate(self, call: HttpCall) -> Admission:
            admission = await super().authenticate(call)
            found.set()
            while connection_limits._used:
                await asyncio.sleep(0.01)
            gone.set()
            return admission

    async with open_address(tmp_path, connection_limits, authenticator=Slow) as port:
        _, writer = await connect(port)
        writer.write(f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        await found.wait()
        writer.transport.abort()
        await gone.wait()
