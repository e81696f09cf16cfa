"""A name server of the tests' own, which knows what it was taught and keeps a list of what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from k8e.engine.local.dns.resolv_conf import Server

# Raw packets instead of an answer: (the question, whether over TCP) -> packets, or None for the usual answer.
Trick = Callable[[dns.message.Message, bool], Sequence[bytes] | None]


@dataclass
class Teacher:
    server: Server
    zone: dict[tuple[str, str], list[dns.rrset.RRset]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # name and type, in order
    over_tcp: int = 0
    trick: Trick | None = None
    silence: asyncio.Event | None = None  # no answer before it is set

    def teach(self, name: str, kind: str, *values: str, ttl: int = 300, aliases: Sequence[str] = ()) -> None:
        """`aliases`: the chain from the name to where the values are."""
        chain = [name, *aliases]
        answer = [
            dns.rrset.from_text(f"{one}.", ttl, "IN", "CNAME", f"{other}.") for one, other in itertools.pairwise(chain)
        ]
        if values:
            answer.append(dns.rrset.from_text(f"{chain[-1]}.", ttl, "IN", kind, *values))
        self.zone[name, kind] = answer

    def reply(self, query: dns.message.Message, tcp: bool) -> Sequence[bytes]:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        self.over_tcp += tcp
        if self.trick is not None and (packets := self.trick(query, tcp)) is not None:
            return packets
        return [self.usual(query, tcp)]

    def usual(self, query: dns.message.Message, tcp: bool) -> bytes:
        name, kind = self.asked[-1]
        reply = dns.message.make_response(query, recursion_available=True)
        reply.answer = list(self.zone.get((name, kind), ()))
        if not reply.answer and not any(known == name for known, _ in self.zone):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        if tcp:
            return reply.to_wire(max_size=65535)
        return reply.to_wire(max_size=max(512, query.payload), prefer_truncation=True)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own transport for datagrams is no asyncio.DatagramTransport, but does what one does.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[object, int]) -> None:
        task = asyncio.ensure_future(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, addr: tuple[object, int]) -> None:
        packets = self._teacher.reply(dns.message.from_wire(data), False)
        if self._teacher.silence is not None:
            await self._teacher.silence.wait()
        for packet in packets:
            self._transport.sendto(packet, addr)


@contextlib.asynccontextmanager
async def open_teacher(address: str = "127.0.0.1") -> AsyncIterator[Teacher]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            for packet in teacher.reply(dns.message.from_wire(await reader.readexactly(length)), True):
                writer.write(struct.pack("!H", min(len(packet), 65535)) + packet)
            await writer.drain()
        writer.close()

    streams = await asyncio.start_server(serve, address, 0)
    port = streams.sockets[0].getsockname()[1]
    teacher = Teacher(Server(ip_address(address), port))
    datagrams, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(teacher), local_addr=(address, port)
    )
    try:
        yield teacher
    finally:
        datagrams.close()
        streams.close()
        await streams.wait_closed()
