"""Routing's netlink, as little of it as a wire needs: a pair of interfaces, their addresses, a route, rules of routing.

By hand, because a wire is made while a caller waits for a sandbox: a dozen messages that the kernel takes a millisecond
for, and a general library ten. Encoding is pure; `RouteSocket` is the edge.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_network

from k8e.engine.local.network.addresses import Network
from k8e.engine.local.network.netlink.messages import (
    CREATE,
    Message,
    NetlinkSocket,
    attribute,
    attributes_of,
    nested,
    text,
)
from k8e.policy import Address

_LINK = struct.Struct("=BxHiII")  # family, kind of device, index, flags, which of them to change
_ADDRESS = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, lengths of destination and source, tos, table, protocol, scope, kind
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_RULE = struct.Struct("=BBBBBxxBI")  # family, lengths of destination and source, tos, table, action, flags
_INDEX_REQUEST = struct.Struct("16si20x")

_NEWLINK, _DELLINK, _SETLINK, _NEWADDR, _GETADDR = 16, 17, 19, 20, 22
_NEWROUTE, _GETROUTE, _NEWNEIGH = 24, 26, 28
_NEWRULE, DELRULE, _GETRULE = 32, 33, 34
_NEW = CREATE | 0x200  # and it must not be there
_UP = 1
_NO_DUPLICATE_CHECK = 0x02
_MAIN, _STATIC, _UNICAST = 254, 4, 1
_PERMANENT = 0x80
_SIOCGIFINDEX = 0x8933

# Attributes.
_MAC, _NAME, _MASTER, _INFO, _ALIAS, _NAMESPACE = 1, 3, 10, 18, 20, 28
_INFO_KIND, _INFO_DATA, _PEER = 1, 2, 1
_ADDR_ADDRESS, _ADDR_LOCAL = 1, 2
_DESTINATION, _OUT, _GATEWAY = 1, 4, 5
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC = 1, 2
_FROM_INTERFACE, _PRIORITY, _MARK, _TABLE, _MASK, _PROTOCOL = 3, 6, 10, 15, 16, 21

_LOCAL = 255  # the table of the machine's own addresses
_LOOK_UP, _PROHIBIT = 1, 8
# As if the kernel had made them: network managers remove rules that they did not make, but not its own.
_KERNEL = 2


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _describe(name: str, mac: str) -> bytes:
    return attribute(_MAC, bytes.fromhex(mac.replace(":", ""))) + text(_NAME, name)


def add_pair(name: str, mac: str, peer: str, peer_mac: str, namespace: int) -> Message:
    """A pair of interfaces; the peer comes into being in the namespace of that descriptor."""
    empty = _LINK.pack(0, 0, 0, 0, 0)
    other = empty + _describe(peer, peer_mac) + attribute(_NAMESPACE, struct.pack("=I", namespace))
    info = nested(_INFO, text(_INFO_KIND, "veth"), nested(_INFO_DATA, attribute(_PEER, other)))
    return Message(_NEWLINK, empty + _describe(name, mac) + info, _NEW)


def add_bridge(name: str) -> Message:
    body = _LINK.pack(0, 0, 0, 0, 0) + text(_NAME, name) + nested(_INFO, text(_INFO_KIND, "bridge"))
    return Message(_NEWLINK, body, _NEW)


def set_master(index: int, bridge: int) -> Message:
    return Message(_SETLINK, _LINK.pack(0, 0, index, 0, 0) + attribute(_MASTER, struct.pack("=I", bridge)))


def set_alias(index: int, alias: str) -> Message:
    return Message(_SETLINK, _LINK.pack(0, 0, index, 0, 0) + text(_ALIAS, alias))


def set_mac(index: int, mac: str) -> Message:
    return Message(_SETLINK, _LINK.pack(0, 0, index, 0, 0) + attribute(_MAC, bytes.fromhex(mac.replace(":", ""))))


def set_up(index: int) -> Message:
    return Message(_SETLINK, _LINK.pack(0, 0, index, _UP, _UP))


def remove_link(index: int) -> Message:
    return Message(_DELLINK, _LINK.pack(0, 0, index, 0, 0))


def add_address(index: int, interface: IPv4Interface | IPv6Interface) -> Message:
    """Of IPv6 not checked for duplicates: a wire has no others, and an address that is being checked cannot be used for
    a second."""
    flags = _NO_DUPLICATE_CHECK if interface.version == 6 else 0
    head = _ADDRESS.pack(_family(interface.ip), interface.network.prefixlen, flags, 0, index)
    local = attribute(_ADDR_LOCAL, interface.ip.packed) if interface.version == 4 else b""
    return Message(_NEWADDR, head + attribute(_ADDR_ADDRESS, interface.ip.packed) + local, _NEW)


def add_default_route(index: int, gateway: Address) -> Message:
    head = _ROUTE.pack(_family(gateway), 0, 0, 0, _MAIN, _STATIC, 0, _UNICAST, 0)
    return Message(
        _NEWROUTE, head + attribute(_GATEWAY, gateway.packed) + attribute(_OUT, struct.pack("=I", index)), _NEW
    )


def add_neighbour(index: int, address: Address, mac: str) -> Message:
    """So that neither end has to ask: an interface without a link-local address cannot, for packets that are not from
    its own address (resets in the name of another)."""
    head = _NEIGHBOUR.pack(_family(address), index, _PERMANENT, 0, 0)
    known = attribute(_NEIGHBOUR_ADDRESS, address.packed)
    return Message(_NEWNEIGH, head + known + attribute(_NEIGHBOUR_MAC, bytes.fromhex(mac.replace(":", ""))), _NEW)


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The fields of a rule that matter here."""

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

    def add(self) -> Message:
        return Message(_NEWRULE, self._describe(), _NEW)

    def remove(self) -> Message:
        """The first one like it."""
        return Message(DELRULE, self._describe())


def own_addresses(family: int, priority: int) -> RoutingRule:
    """The rule that finds out whether a packet is for the machine itself."""
    return RoutingRule(family, priority, _LOOK_UP, _LOCAL)


def prohibit_unmarked(family: int, interface: str, bit: int) -> RoutingRule:
    """Before all others: packets from there are not routed, unless their mark has the bit."""
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


class RouteSocket(NetlinkSocket):
    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE)

    def index_of(self, name: str) -> int:
        """OSError when there is none."""
        answer = fcntl.ioctl(self._socket, _SIOCGIFINDEX, _INDEX_REQUEST.pack(name.encode(), 0))
        index: int = _INDEX_REQUEST.unpack(answer)[1]
        return index

    def rules(self, family: int) -> list[RoutingRule]:
        """In the order in which they count."""
        return [read_rule(body) for body in self.dump(Message(_GETRULE, _RULE.pack(family, 0, 0, 0, 0, 0, 0)))]

    def networks(self) -> list[Network]:
        """The destinations of all routes of the machine, and the networks of its addresses. (A default route leads
        nowhere in particular.)"""
        found = []
        for kind, head, place in ((_GETROUTE, _ROUTE, _DESTINATION), (_GETADDR, _ADDRESS, _ADDR_ADDRESS)):
            for body in self.dump(Message(kind, bytes(head.size))):
                family, length = body[:2]
                address = attributes_of(body[head.size :]).get(place)
                if family in (socket.AF_INET, socket.AF_INET6) and length and address:
                    found.append(ip_network((address, length), strict=False))
        return found
