"""Routing's netlink, as little of it as a wire needs: a pair of interfaces, their addresses, a route, rules of routing.

By hand, because a wire is made while somebody waits for a sandbox: a dozen messages that the kernel takes a millisecond
for, and a general library ten. Encoding is pure; `RouteSocket` is the edge.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface

from k8e.engine.local.network.netlink import NetlinkError, attribute, attributes_of, nested, read_messages, text
from k8e.policy import Address

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, kind of device, index, flags, which of them to change
_ADDRESS = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, lengths of destination and source, tos, table, protocol, scope, kind
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_RULE = struct.Struct("=BBBBBxxBI")  # family, lengths of destination and source, tos, table, action, flags
_INDEX_REQUEST = struct.Struct("16si20x")

_NEWLINK, _DELLINK, _SETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 19, 20, 24, 28
_NEWRULE, DELRULE, _GETRULE = 32, 33, 34
_REQUEST, _ACK, _EXCLUSIVE, _CREATE, _DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
_NEW = _CREATE | _EXCLUSIVE
_ERROR, _DONE = 2, 3
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
_FROM_INTERFACE, _PRIORITY, _MARK, _TABLE, _MASK, _PROTOCOL = 3, 6, 10, 15, 16, 21

_LOCAL = 255  # the table of the machine's own addresses
_LOOK_UP, _PROHIBIT = 1, 8
# As if the kernel had made them: network managers remove rules that they did not make, but not its own.
_KERNEL = 2

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


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """As far as we tell them apart."""

    family: int
    priority: int
    action: int
    table: int
    interface: str = ""
    unmarked: int = 0  # what of a packet's mark has to be 0

    @property
    def looks_up_own_addresses(self) -> bool:
        return (self.action, self.table, self.interface) == (_LOOK_UP, _LOCAL, "")

    def _describe(self) -> bytes:
        body = _RULE.pack(self.family, 0, 0, 0, self.table, self.action, 0)
        body += attribute(_PRIORITY, struct.pack("=I", self.priority)) + attribute(_PROTOCOL, bytes([_KERNEL]))
        if self.interface:
            body += text(_FROM_INTERFACE, self.interface)
        if self.unmarked:
            body += attribute(_MARK, bytes(4)) + attribute(_MASK, struct.pack("=I", self.unmarked))
        return body

    def add(self) -> Request:
        return _NEWRULE, _NEW, self._describe()

    def remove(self) -> Request:
        """The first one like it."""
        return DELRULE, 0, self._describe()


def own_addresses(family: int, priority: int) -> RoutingRule:
    """The rule that finds out whether a packet is for the machine itself."""
    return RoutingRule(family, priority, _LOOK_UP, _LOCAL)


def prohibit_unmarked(family: int, interface: str, bit: int) -> RoutingRule:
    """Before all others: what comes from there goes nowhere, unless somebody has put the bit into its mark."""
    return RoutingRule(family, 0, _PROHIBIT, 0, interface, bit)


def read_rule(body: bytes) -> RoutingRule:
    family, _, _, _, table, action, _ = _RULE.unpack_from(body)
    found = attributes_of(body[_RULE.size :])
    mark = struct.unpack("=I", found.get(_MARK, bytes(4)))[0]
    return RoutingRule(
        family,
        struct.unpack("=I", found.get(_PRIORITY, bytes(4)))[0],
        action,
        struct.unpack("=I", found[_TABLE])[0] if _TABLE in found else table,
        found.get(_FROM_INTERFACE, b"").rstrip(b"\0").decode(errors="replace"),
        0 if mark else struct.unpack("=I", found.get(_MASK, bytes(4)))[0],
    )


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

    def rules(self, family: int) -> list[RoutingRule]:
        """In the order in which they count."""
        self._sequence += 1
        self._socket.send(_encode(self._sequence, (_GETRULE, _DUMP, _RULE.pack(family, 0, 0, 0, 0, 0, 0))))
        found: list[RoutingRule] = []
        while True:
            for kind, sequence, body in read_messages(self._socket.recv(1 << 16)):
                if sequence != self._sequence:
                    continue
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    raise NetlinkError(code, os.strerror(code))
                found.append(read_rule(body))

    def _await_answers(self, expected: Sequence[int]) -> list[int]:
        codes: dict[int, int] = {}
        while len(codes) < len(expected):
            for kind, sequence, body in read_messages(self._socket.recv(1 << 16)):
                if kind == _ERROR and sequence in expected:
                    codes[sequence] = -struct.unpack_from("=i", body)[0]
        return [codes[number] for number in expected]


def _encode(sequence: int, request: Request) -> bytes:
    kind, flags, body = request
    padding = bytes(-len(body) % 4)
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, kind, _REQUEST | _ACK | flags, sequence, 0) + body + padding
