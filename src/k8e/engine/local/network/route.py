"""Routing's netlink, as little of it as a wire needs: a pair of interfaces, their addresses, a route.

By hand, because a wire is made while somebody waits for a sandbox: a dozen messages that the kernel takes a millisecond
for, and a general library ten. Encoding is pure; `RouteSocket` is the edge.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Interface, IPv6Interface

from k8e.engine.local.network.netlink import NetlinkError, attribute, nested, text
from k8e.policy import Address

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, kind of device, index, flags, which of them to change
_ADDRESS = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, lengths of destination and source, tos, table, protocol, scope, kind
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_INDEX_REQUEST = struct.Struct("16si20x")

_NEWLINK, _DELLINK, _SETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 19, 20, 24, 28
_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_NEW = _CREATE | _EXCLUSIVE
_ERROR = 2
_UP = 1
_NO_DUPLICATE_CHECK = 0x02
_MAIN, _STATIC, _UNICAST = 254, 4, 1
_PERMANENT = 0x80
_SIOCGIFINDEX = 0x8933
_SECONDS = 30.0

# Attributes.
_MAC, _NAME, _INFO, _ALIAS, _NAMESPACE = 1, 3, 18, 20, 28
_INFO_KIND, _INFO_DATA, _PEER = 1, 2, 1
_ADDR_ADDRESS, _ADDR_LOCAL = 1, 2
_OUT, _GATEWAY = 4, 5
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC = 1, 2

Request = tuple[int, int, bytes]  # type, flags, body


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _describe(name: str, mac: str) -> bytes:
    return attribute(_MAC, bytes.fromhex(mac.replace(":", ""))) + text(_NAME, name)


def add_pair(name: str, mac: str, peer: str, peer_mac: str, namespace: int) -> Request:
    """A pair of interfaces; the peer comes into being in the namespace of that descriptor."""
    empty = _LINK.pack(0, 0, 0, 0, 0)
    other = empty + _describe(peer, peer_mac) + attribute(_NAMESPACE, struct.pack("=I", namespace))
    info = nested(_INFO, text(_INFO_KIND, "veth"), nested(_INFO_DATA, attribute(_PEER, other)))
    return _NEWLINK, _NEW, empty + _describe(name, mac) + info


def set_alias(index: int, alias: str) -> Request:
    return _SETLINK, 0, _LINK.pack(0, 0, index, 0, 0) + text(_ALIAS, alias)


def set_up(index: int) -> Request:
    return _SETLINK, 0, _LINK.pack(0, 0, index, _UP, _UP)


def remove_link(index: int) -> Request:
    return _DELLINK, 0, _LINK.pack(0, 0, index, 0, 0)


def add_address(index: int, interface: IPv4Interface | IPv6Interface) -> Request:
    """Of IPv6 not checked for duplicates: nobody else is on the wire, and one that is still being checked is of no use
    for a second."""
    flags = _NO_DUPLICATE_CHECK if interface.version == 6 else 0
    head = _ADDRESS.pack(_family(interface.ip), interface.network.prefixlen, flags, 0, index)
    local = attribute(_ADDR_LOCAL, interface.ip.packed) if interface.version == 4 else b""
    return _NEWADDR, _NEW, head + attribute(_ADDR_ADDRESS, interface.ip.packed) + local


def add_default_route(index: int, gateway: Address) -> Request:
    head = _ROUTE.pack(_family(gateway), 0, 0, 0, _MAIN, _STATIC, 0, _UNICAST, 0)
    return _NEWROUTE, _NEW, head + attribute(_GATEWAY, gateway.packed) + attribute(_OUT, struct.pack("=I", index))


def add_neighbour(index: int, address: Address, mac: str) -> Request:
    """So that nobody has to ask for it: an interface without a link-local address cannot, for packets that are not from
    its own (resets in somebody else's name)."""
    head = _NEIGHBOUR.pack(_family(address), index, _PERMANENT, 0, 0)
    known = attribute(_NEIGHBOUR_ADDRESS, address.packed)
    return _NEWNEIGH, _NEW, head + known + attribute(_NEIGHBOUR_MAC, bytes.fromhex(mac.replace(":", "")))


class RouteSocket:
    """For the network namespace of whoever opens it, wherever they go afterwards."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(_SECONDS)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> RouteSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def index_of(self, name: str) -> int:
        """OSError when there is none."""
        answer = fcntl.ioctl(self._socket, _SIOCGIFINDEX, _INDEX_REQUEST.pack(name.encode(), 0))
        index: int = _INDEX_REQUEST.unpack(answer)[1]
        return index

    def request(self, *requests: Request) -> None:
        """In this order. Raises NetlinkError of the first that failed; the others may have happened."""
        first = self._sequence + 1
        self._sequence += len(requests)
        self._socket.send(b"".join(_encode(number, each) for number, each in enumerate(requests, first)))
        codes = self._await_answers(range(first, self._sequence + 1))
        for code in codes:
            if code:
                raise NetlinkError(code, os.strerror(code))

    def _await_answers(self, expected: Sequence[int]) -> list[int]:
        codes: dict[int, int] = {}
        while len(codes) < len(expected):
            data = self._socket.recv(1 << 16)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
                if length < _HEADER.size:
                    raise NetlinkError(errno.EPROTO, "an answer that is shorter than its own header")
                if kind == _ERROR and sequence in expected:
                    codes[sequence] = -struct.unpack_from("=i", data, offset + _HEADER.size)[0]
                offset += length + -length % 4
        return [codes[number] for number in expected]


def _encode(sequence: int, request: Request) -> bytes:
    kind, flags, body = request
    padding = bytes(-len(body) % 4)
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, kind, _REQUEST | _ACK | flags, sequence, 0) + body + padding
