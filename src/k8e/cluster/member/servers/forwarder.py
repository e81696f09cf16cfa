"""Forwards connections on a node's loopback address to a server of the cluster that lives: the kubelet and kube-proxy
know one address, which stays the same when a server is lost.

    python -m k8e.cluster.member.servers.forwarder SERVERS PORT

TLS ends at the API server: bytes go through unread. It is a process of its own, so that a node keeps its connection
while the supervisor is replaced. The file SERVERS is read for each connection; those to a server that is not in it any
more are ended, because a server may be reachable and of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PORT: Final = 6444
_DIAL: Final = 3.0
_LOOK: Final = 1.0
_SILENCE: Final = 10  # seconds without an answer of the other machine's kernel
_CHUNK: Final = 1 << 16


class Forwarder:
    def __init__(self, servers: Path) -> None:
        self._file = servers
        self._open: dict[asyncio.StreamWriter, str] = {}  # connections to servers

    async def serve(self, host: str, port: int) -> None:
        server = await asyncio.start_server(self._take, host, port, limit=_CHUNK)
        async with server, asyncio.TaskGroup() as group:
            group.create_task(self._end_useless())
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = await self._dial()
        if found is None:
            writer.transport.abort()
            return
        server, inner_reader, inner_writer = found
        self._open[inner_writer] = server
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, inner_writer))
                group.create_task(_copy(inner_reader, writer))
        except* OSError:
            pass
        finally:
            del self._open[inner_writer]
            for each in (writer, inner_writer):
                each.transport.abort()

    async def _dial(self) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter] | None:
        for server in await asyncio.to_thread(self._read):
            host, _, port = server.rpartition(":")
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(_DIAL):
                    reader, writer = await asyncio.open_connection(host, int(port), limit=_CHUNK)
                _notice_silence(writer.get_extra_info("socket"))
                return server, reader, writer
        return None

    async def _end_useless(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            servers = await asyncio.to_thread(self._read)
            for writer, server in list(self._open.items()):
                if servers and server not in servers:
                    writer.transport.abort()

    def _read(self) -> Sequence[str]:
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return []
        return [str(each) for each in found] if isinstance(found, list) else []


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender's end, which is passed on."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _notice_silence(connection: socket.socket) -> None:
    """A machine without power ends no connection: the kernel asks it, and gives up."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)


def main() -> None:
    servers, port = Path(sys.argv[1]), int(sys.argv[2])
    asyncio.run(Forwarder(servers).serve("127.0.0.1", port))


if __name__ == "__main__":
    main()
