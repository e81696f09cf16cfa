"""Connections that the kernel tracks: found by their marks, deleted, and cut so that both ends notice at once.

Rules alone stop the packets of a revoked connection, but a program that only waits sends none, and would wait for ever.
So each end is sent one packet that belongs to nothing: a number far outside of what it expects. It answers with what
it does expect; that answer meets the rules, or a machine that knows no such connection, and comes back as a reset with
just the right number. It works on any stack, also on gVisor's own, which no tool of the machine can look into.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address

from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.netlink.messages import (
    CONNTRACK,
    NetfilterSocket,
    NetlinkError,
    attribute,
    attributes_of,
    nested,
    netfilter_attributes,
    netfilter_message,
)
from k8e.policy import Address

_GET, _DELETE = 1, 2
_ORIGINAL, _REPLY, _MARK, _ID, _MARK_MASK = 1, 2, 8, 12, 21
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_SOURCE4, _TARGET4, _SOURCE6, _TARGET6 = 1, 2, 3, 4
_PROTO_NUMBER, _SOURCE_PORT, _TARGET_PORT = 1, 2, 3
_TCP = 6
_ACK = 0x10
_IPV6_HDRINCL = 36


@dataclass(frozen=True, slots=True)
class Tuple:
    source: Address
    source_port: int
    target: Address
    target_port: int


@dataclass(frozen=True, slots=True)
class Connection:
    original: Tuple  # as the sandbox sees it
    reply: Tuple  # as the other end answers it: to the machine's own address
    mark: int
    attributes: tuple[bytes, bytes]  # as the kernel encodes it: tuple and identity

    @property
    def family(self) -> int:
        return socket.AF_INET if self.original.source.version == 4 else socket.AF_INET6


def _mark_filter(wire: Wire) -> bytes:
    value, mask = wire.mark_range
    return attribute(_MARK, struct.pack("!I", value)) + attribute(_MARK_MASK, struct.pack("!I", mask))


def list_connections(kernel: NetfilterSocket, wire: Wire) -> list[Connection]:
    """Those that a sandbox opened and its list allowed. The kernel searches all of the machine's for them."""
    answers = kernel.dump(netfilter_message(CONNTRACK, _GET, socket.AF_UNSPEC, _mark_filter(wire)))
    return [connection for connection in map(_read_connection, answers) if connection is not None]


def forget_connections(kernel: NetfilterSocket, wire: Wire) -> None:
    """Of a wire that no sandbox has any more."""
    kernel.request(netfilter_message(CONNTRACK, _DELETE, socket.AF_UNSPEC, _mark_filter(wire)))


def cut_connections(kernel: NetfilterSocket, wire: Wire, marks: Collection[int]) -> int:
    """Those with these marks, which the rules do not let through any more. How many there were."""
    revoked = [each for each in list_connections(kernel, wire) if each.mark in marks]
    for connection in revoked:
        original, identity = connection.attributes
        with contextlib.suppress(NetlinkError):  # gone by itself
            message = nested(_ORIGINAL, original) + attribute(_ID, identity)
            kernel.request(netfilter_message(CONNTRACK, _DELETE, connection.family, message))
    for connection in revoked:
        provoke_sandbox(wire, connection)
        provoke_other_end(connection)
    return len(revoked)


def _read_connection(answer: bytes) -> Connection | None:
    fields = netfilter_attributes(answer)
    if not {_ORIGINAL, _REPLY, _MARK, _ID} <= fields.keys():
        return None
    original, reply = _read_tuple(fields[_ORIGINAL]), _read_tuple(fields[_REPLY])
    if original is None or reply is None:
        return None
    return Connection(original, reply, int.from_bytes(fields[_MARK], "big"), (fields[_ORIGINAL], fields[_ID]))


def _read_tuple(data: bytes) -> Tuple | None:
    fields = attributes_of(data)
    addresses, protocol = attributes_of(fields[_TUPLE_IP]), attributes_of(fields[_TUPLE_PROTO])
    if protocol.get(_PROTO_NUMBER) != bytes((_TCP,)):
        return None
    source, target = addresses.get(_SOURCE4) or addresses[_SOURCE6], addresses.get(_TARGET4) or addresses[_TARGET6]
    ports = [int.from_bytes(protocol[kind], "big") for kind in (_SOURCE_PORT, _TARGET_PORT)]
    return Tuple(ip_address(source), ports[0], ip_address(target), ports[1])


# The packets ---------------------------------------------------------------------------------------------------------


def build_segment(path: Tuple, sequence: int, acknowledgement: int) -> bytes:
    """An empty TCP segment, as an IP packet."""
    header = struct.pack(
        "!HHIIBBHHH", path.source_port, path.target_port, sequence, acknowledgement, 5 << 4, _ACK, 0, 0, 0
    )
    pseudo = path.source.packed + path.target.packed + struct.pack("!II", len(header), _TCP)
    checksum = _checksum(pseudo + header)
    segment = header[:16] + struct.pack("!H", checksum) + header[18:]
    if isinstance(path.source, IPv4Address):
        start = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0x4000, 64, _TCP, 0)
        start += path.source.packed + path.target.packed
        return start[:10] + struct.pack("!H", _checksum(start)) + start[12:] + segment
    return struct.pack("!IHBB", 6 << 28, len(segment), _TCP, 64) + path.source.packed + path.target.packed + segment


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _bogus_segment(path: Tuple) -> bytes:
    return build_segment(path, secrets.randbits(32), secrets.randbits(32))


def provoke_sandbox(wire: Wire, connection: Connection) -> None:
    """On the wire itself, past the machine's rules and its memory of connections."""
    seen = connection.original
    packet = _bogus_segment(Tuple(seen.target, seen.target_port, seen.source, seen.source_port))
    kind = 0x0800 if seen.source.version == 4 else 0x86DD
    frame = _hardware(wire.inner_mac) + _hardware(wire.host_mac) + struct.pack("!H", kind) + packet
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    with sender, contextlib.suppress(OSError):  # the wire has gone, and with it the connection
        sender.bind((wire.interface, 0))
        sender.send(frame)


def _hardware(address: str) -> bytes:
    return bytes.fromhex(address.replace(":", ""))


def provoke_other_end(connection: Connection) -> None:
    """From the address that it knows the sandbox by. Without this it would notice with its next packet."""
    known = connection.reply
    packet = _bogus_segment(Tuple(known.target, known.target_port, known.source, known.source_port))
    try:
        with socket.socket(connection.family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as sender:
            if connection.family == socket.AF_INET6:
                sender.setsockopt(socket.IPPROTO_IPV6, _IPV6_HDRINCL, 1)
            sender.sendto(packet, (str(known.source), 0))
    except OSError as error:
        if error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EPERM, errno.EINVAL, errno.EADDRNOTAVAIL):
            raise
