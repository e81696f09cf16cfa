"""A resolver on loopback with everything it told its owner, and a client that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import dns.message
import dns.rdatatype

from k8e.engine.local.dns.resolv_conf import Server
from k8e.engine.local.dns.server import NameServer
from k8e.engine.local.dns.upstream import Upstream
from k8e.policy import Address, HostEntry, HostList

# Other tests listen on loopback at the same time: each starts somewhere else.
_addresses = (
    IPv4Address(number) for number in itertools.count(int(IPv4Address("127.64.0.1")) + random.randrange(1 << 20))
)
PORT = 5353


@dataclass
class Resolver:
    server: NameServer
    admitted: list[tuple[str, str, str, tuple[str, ...], float]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    mirrors: frozenset[str] = frozenset()
    on_admit: Callable[[], Awaitable[None]] | None = None
    addresses: dict[str, IPv4Address] = field(default_factory=dict)

    async def serve(self, sandbox: str, *hosts: str) -> IPv4Address:
        address = next(_addresses)
        await self.server.serve(sandbox, [address], HostList.parse(hosts))
        self.addresses[sandbox] = address
        return address

    async def ask(self, sandbox: str, name: str, kind: str = "A", *, edns: bool = True) -> dns.message.Message:
        query = dns.message.make_query(name, kind, use_edns=0 if edns else None)
        reply = dns.message.from_wire(await self.send(sandbox, query.to_wire()))
        assert query.is_response(reply)
        return reply

    async def send(self, sandbox: str, packet: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with self.dial(sandbox) as client:
            await loop.sock_sendall(client, packet)
            async with asyncio.timeout(30):
                return await loop.sock_recv(client, 65535)

    def dial(self, sandbox: str) -> socket.socket:
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        client.connect((str(self.addresses[sandbox]), PORT))
        return client

    async def send_over_tcp(self, sandbox: str, packet: bytes) -> bytes:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(str(self.addresses[sandbox]), PORT)
            try:
                writer.write(struct.pack("!H", len(packet)) + packet)
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                return await reader.readexactly(length)
            finally:
                writer.close()
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def open_resolver(
    *servers: Server, upstream: Upstream | None = None, port: int = PORT
) -> AsyncIterator[Resolver]:
    """With these servers upstream, or with an upstream of one's own."""

    async def admit(sandbox: str, entry: HostEntry, name: str, addresses: Sequence[Address], seconds: float) -> None:
        resolver.admitted.append((sandbox, str(entry), name, tuple(str(address) for address in addresses), seconds))
        if resolver.on_admit is not None:
            await resolver.on_admit()

    def refused(sandbox: str, name: str, reason: str, address: str) -> None:
        resolver.refused.append((sandbox, name, reason))

    upstream = upstream or Upstream(servers)
    resolver = Resolver(NameServer(upstream, admit, refused, lambda: resolver.mirrors, port=port, redirected_port=None))
    try:
        yield resolver
    finally:
        await resolver.server.close()


def texts(reply: dns.message.Message) -> list[str]:
    """The values of the answer, sorted."""
    return sorted(record.to_text() for rrset in reply.answer for record in rrset)
