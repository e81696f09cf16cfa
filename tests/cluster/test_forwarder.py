"""The forwarder of a node, as a process, in front of real servers on loopback addresses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from k8e.cluster.member.servers.server_list import order_servers, read_slices

PATIENCE = 30.0


class Echo:
    """A server that says its name, then repeats what it gets."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.connections: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self.address

    async def stop(self) -> None:
        self.server.close()
        for writer in self.connections:
            writer.transport.abort()
        await self.server.wait_closed()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        writer.write(self.name + b"\n")
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def forward(folder: Path, servers: Sequence[str]) -> AsyncIterator[tuple[Path, int]]:
    path, port = folder / "servers.json", find_port()
    path.write_text(json.dumps(list(servers)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "k8e.cluster.member.servers.forwarder", str(path), str(port)
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        yield path, port
    finally:
        process.kill()
        await process.wait()


async def ask(port: int) -> bytes:
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await reader.readline()
        finally:
            writer.close()


async def test_bytes_go_both_ways_to_the_first_server_and_its_end_is_passed_on(tmp_path: Path) -> None:
    one, two = Echo(b"one"), Echo(b"two")
    content = bytes(range(256)) * 4096
    async with forward(tmp_path, [await one.start(), await two.start()]) as (_, port), asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.readline() == b"one\n"
        writer.write(content)
        writer.write_eof()
        assert await reader.read(-1) == content
        writer.close()
    await one.stop()
    await two.stop()


async def test_a_server_that_is_lost_is_left_for_the_next(tmp_path: Path) -> None:
    one, two = Echo(b"one"), Echo(b"two")
    async with forward(tmp_path, [await one.start(), await two.start()]) as (_, port):
        assert await ask(port) == b"one\n"
        await one.stop()
        assert await ask(port) == b"two\n"
        await two.stop()
        assert await ask(port) == b""  # none lives: the connection is ended, not kept


async def test_connections_to_a_server_that_is_not_in_the_list_any_more_are_ended(tmp_path: Path) -> None:
    """It still accepts them: it may have lost its etcd."""
    one, two = Echo(b"one"), Echo(b"two")
    async with forward(tmp_path, [await one.start(), await two.start()]) as (path, port), asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.readline() == b"one\n"
        path.write_text(json.dumps([two.address]))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read(-1) == b""
        writer.close()
        assert await ask(port) == b"two\n"
        path.write_text("damaged")
        assert await ask(port) == b""
        path.write_text(json.dumps([two.address]))
        assert await ask(port) == b"two\n"
    await one.stop()
    await two.stop()


def test_the_list_of_servers_is_read_from_endpoints() -> None:
    ready, gone = (
        {"addresses": ["10.0.0.2"], "conditions": {"ready": True}},
        {"addresses": ["10.0.0.3"], "conditions": {"ready": False}},
    )
    body = {"items": [{"ports": [{"port": 6443}], "endpoints": [ready, gone, {"addresses": ["10.0.0.1"]}]}]}
    assert read_slices(body) == ["10.0.0.1:6443", "10.0.0.2:6443"]
    assert read_slices({"items": None}) == []


def test_a_node_tries_its_own_server_first_and_the_given_address_last() -> None:
    found = ["10.0.0.1:6443", "10.0.0.2:6443"]
    assert order_servers(found, "10.0.0.2:6443", "https://balancer") == [
        "10.0.0.2:6443",
        "10.0.0.1:6443",
        "balancer:6443",
    ]
    assert order_servers(found, "10.0.0.9:6443", "https://10.0.0.1:6443") == found
