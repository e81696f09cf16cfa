"""Everything on the other side of the machine's uplink, in one process with a network namespace of its own.

It owns every address there is: whatever reaches it is answered, over TCP (HTTP that says which address was reached),
TLS, UDP (echo) and DNS, so that a refusal elsewhere means something. It notes every packet on its wire. The test
speaks with it in lines of JSON over its standard streams; it ends when they do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from tests.egress.namespaces import unshare_network
from tests.egress.zones import NameService

WIRE = "world0"
PLAIN_PORTS = (22, 80, 853, 3128, 7000, 8080, 8443)
TLS_PORTS = (443,)
ECHO_PORTS = (123, 443, 9999)
DNS_PORT = 53

_IP_PKTINFO = 8
_IPV6_FREEBIND = 78
_PACKET_OUTGOING = 4
_NEIGHBOURS = range(133, 138)  # ICMPv6 types: a wire's own talk
_UNREACHABLE = (1, 3)  # ICMPv6's and ICMP's type
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}


class World:
    def __init__(self, certificate: str) -> None:
        self.names = NameService()
        self.connections: list[tuple[str, int]] = []  # address and port that were reached
        self.packets: list[tuple[str, str, int]] = []  # protocol, destination, port
        self.held: list[asyncio.StreamWriter] = []
        self.files: dict[str, tuple[str, bytes]] = {}  # type and content of pages, by path, on every host
        self._certificate = certificate
        self._markers: set[bytes] = set()
        self._opened: set[tuple[str, int]] = set()

    async def open(self) -> None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self._certificate)
        for host in ("0.0.0.0", "::"):
            for port in PLAIN_PORTS:
                await asyncio.start_server(self._serve, host, port)
            for port in TLS_PORTS:
                await asyncio.start_server(self._serve, host, port, ssl=tls)
            await asyncio.start_server(self._serve_dns, host, DNS_PORT)
            for port in ECHO_PORTS:
                self._bind_udp(host, port, lambda data: data)
            self._bind_udp(host, DNS_PORT, lambda data: self.names.reply(data, "udp"))
        self._watch_wire()

    # TCP ----------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("sockname")[:2]
        self.connections.append((address, port))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode(errors="replace")
            if path == "/silent":
                writer.write(b"HTTP/1.0 200 OK\r\n\r\nopen\n")
                await writer.drain()
                self.held.append(writer)
                await reader.read()  # nothing is said any more until the other side goes
                return
            if path == "/ticks":
                writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    writer.write(b"tick\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            page = json.dumps({"address": address, "port": port, "path": path, "credentials": "metadata-secret"})
            kind, body = self.files.get(path, ("application/json", page.encode()))
            writer.write(f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            writer.write(body)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def _serve_dns(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer.get_extra_info("sockname")[:2])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
                wire = self.names.reply(await reader.readexactly(size), "tcp")
                writer.write(struct.pack("!H", len(wire)) + wire)
                await writer.drain()
        writer.close()

    # UDP ----------------------------------------------------------------------------------------------------------

    def _bind_udp(self, host: str, port: int, reply: Callable[[bytes], bytes]) -> None:
        """Answers come from the address that was asked, whichever it was."""
        six = ":" in host
        server = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            server.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)  # else only addresses of interfaces answer
        else:
            server.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        server.bind((host, port))
        server.setblocking(False)

        def answer() -> None:
            data, ancillary, _, peer = server.recvmsg(65535, 256)
            for level, kind, value in ancillary:
                if six and kind == socket.IPV6_PKTINFO:
                    info = value[:16] + b"\0" * 4
                elif not six and kind == _IP_PKTINFO:
                    info = b"\0" * 4 + value[8:12] + b"\0" * 4
                else:
                    continue
                with contextlib.suppress(OSError):
                    server.sendmsg([reply(data)], [(level, kind, info)], 0, peer)

        asyncio.get_running_loop().add_reader(server, answer)

    # The wire -----------------------------------------------------------------------------------------------------

    def _watch_wire(self) -> None:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        wire.bind((WIRE, 3))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        wire.setblocking(False)

        def note() -> None:
            while True:
                try:
                    packet, (_, ethertype, kind, *_) = wire.recvfrom(65535)
                except BlockingIOError:
                    return
                if kind != _PACKET_OUTGOING and ethertype in (0x0800, 0x86DD):
                    self._note(packet)

        asyncio.get_running_loop().add_reader(wire, note)

    def _note(self, packet: bytes) -> None:
        if packet[0] >> 4 == 4:
            number, target, rest = packet[9], str(IPv4Address(packet[16:20])), packet[(packet[0] & 15) * 4 :]
        else:
            number, target, rest = packet[6], str(IPv6Address(packet[24:40])), packet[40:]
        if number == 58 and rest and rest[0] in _NEIGHBOURS:
            return
        protocol = _PROTOCOLS.get(number, str(number))
        if protocol == "icmp" and rest[0] in _UNREACHABLE and any(target == address for address, _ in self._opened):
            return  # the machine's answer to a server that still speaks to a sandbox that is gone
        port = int.from_bytes(rest[2:4], "big") if protocol in ("tcp", "udp") else 0
        if protocol == "tcp" and rest[13] & 0x12 == 0x02:
            self._opened.add((target, port))
        elif protocol == "tcp" and (target, port) in self._opened:
            return  # more of a connection whose beginning was noted, some of it long after
        if protocol == "udp" and port == 9:
            self._markers.add(rest[8:])
        elif not target.startswith("ff02:"):  # the kernel's own talk when a wire comes up
            self.packets.append((protocol, target, port))

    # The test -----------------------------------------------------------------------------------------------------

    async def obey(self, order: dict[str, Any]) -> Any:
        match order["do"]:
            case "zone":
                self.names.publish(order["zone"])
            case "file":
                self.files[order["path"]] = (order["type"], base64.b64decode(order["content"]))
            case "clear":
                for noted in (self.names.questions, self.connections, self.packets):
                    noted.clear()
            case "await":
                while order["marker"].encode() not in self._markers:
                    await asyncio.sleep(0.002)
            case "notes":
                return {
                    "questions": self.names.questions,
                    "connections": self.connections,
                    "packets": self.packets,
                }
            case "speak":  # on every connection that is held open in silence
                for writer in self.held:
                    with contextlib.suppress(OSError):
                        writer.write(b"spoken\n")
            case other:
                raise AssertionError(other)
        return None


async def main() -> None:
    unshare_network()
    say = sys.stdout
    say.write(f"{os.getpid()}\n")
    say.flush()
    loop = asyncio.get_running_loop()
    world: World | None = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "open":
            world = World(order["certificate"])
            await world.open()
            answer = None
        else:
            assert world is not None
            answer = await world.obey(order)
        say.write(json.dumps({"answer": answer}) + "\n")
        say.flush()


if __name__ == "__main__":
    asyncio.run(main())
