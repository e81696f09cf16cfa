"""A remote host for the doctor's sandboxes to reach: it has a name and a wire of its own, so that no packet leaves the
machine.

It is in a network namespace that ends with the doctor, whatever happens. Its address is leased from the pool like a
sandbox's, but its interface has another kind of name: the rules for sandboxes must not apply to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import cast

import dns.exception
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from k8e.engine.local.dns.resolv_conf import Server
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.system.calls import CLONE_NEWNET, setns
from k8e.engine.tasks import finish_in_thread, in_own_thread

NAME = "far-end.k8e-doctor.test"
BANNER = b"the far end\n"


@dataclass(frozen=True, slots=True)
class RemoteHost:
    name: str
    address: IPv4Address
    port: int
    machine: IPv4Address  # an address of the machine itself, on which something listens
    machine_port: int


class RemoteWire(Wire):
    @property
    def interface(self) -> str:
        return f"k8ex{self.index}"


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """Serves on the machine's loopback."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    try:
        yield names
    finally:
        transport.close()


class NameServer(asyncio.DatagramProtocol):
    """Answers for one name, as soon as it has an address."""

    def __init__(self) -> None:
        self.address: IPv4Address | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # asyncio's own is not an instance of it
        self.server = Server(IPv4Address("127.0.0.1"), transport.get_extra_info("sockname")[1])

    def datagram_received(self, data: bytes, peer: tuple[str | int, int]) -> None:
        try:
            question = dns.message.from_wire(data)
        except dns.exception.DNSException:
            return
        reply = dns.message.make_response(question)
        asked = question.question[0] if question.question else None
        if asked is None or self.address is None or asked.name.to_text(omit_final_dot=True).lower() != NAME:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif asked.rdtype == dns.rdatatype.A:
            reply.answer.append(dns.rrset.from_text(asked.name, 60, "IN", "A", str(self.address)))
        self._transport.sendto(reply.to_wire(), peer)


@contextlib.asynccontextmanager
async def open_remote_host(wire: Wire) -> AsyncIterator[RemoteHost]:
    from k8e.engine.local.network.wires import open_wire, remove_wire

    remote = RemoteWire(wire.index, wire.host4, None)
    namespace = await finish_in_thread(open_wire, remote, "none: the doctor's")
    try:
        outside = socket.create_server((str(remote.host4), 0))
        inside = await finish_in_thread(_listen_inside, namespace, str(remote.inner4))
        greeting = asyncio.create_task(_greet(inside))
        try:
            yield RemoteHost(NAME, remote.inner4, inside.getsockname()[1], remote.host4, outside.getsockname()[1])
        finally:
            greeting.cancel()
            await asyncio.wait([greeting])
            inside.close()
            outside.close()
    finally:
        os.close(namespace)
        await finish_in_thread(remove_wire, remote)


def _listen_inside(namespace: int, address: str) -> socket.socket:
    """A socket stays in the namespace in which it was made."""

    def listen() -> socket.socket:
        setns(namespace, CLONE_NEWNET)
        return socket.create_server((address, 0))

    listener = in_own_thread(listen)
    listener.setblocking(False)
    return listener


async def _greet(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        with connection, contextlib.suppress(OSError):
            await loop.sock_sendall(connection, BANNER)
