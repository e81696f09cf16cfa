"""Interfaces that others made, as routing's netlink tells of them: which of ours is the other end of one in another
network namespace, and what a route or a neighbour on it looks like."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from k8e.engine.local.network.netlink.messages import CREATE, Message, NetlinkSocket, attribute, attributes_of
from k8e.policy import Address

_LINK = struct.Struct("=BxHiII")  # family, kind of device, index, flags, which of them to change
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, lengths of destination and source, tos, table, protocol, scope, kind
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_ADDRESS = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index
_GENERIC = struct.Struct("=B3x")
_GETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH, _DELNEIGH, _GETNSID = 18, 20, 24, 28, 29, 90
_MAIN, _STATIC, _ON_LINK, _ON_HOST, _UNICAST = 254, 4, 253, 254, 1
_REPLACE = CREATE | 0x100
_PROXY, _PERMANENT = 0x08, 0x80

# Attributes.
_MAC, _NAME, _PEER, _MASTER, _PEER_NAMESPACE, _TARGET_NAMESPACE = 1, 3, 5, 10, 37, 46
_ADDR_ADDRESS, _ADDR_LOCAL = 1, 2
_DESTINATION, _OUT = 1, 4
_NEIGHBOUR_ADDRESS, _NEIGHBOUR_MAC = 1, 2
_NSID, _NSID_DESCRIPTOR = 1, 3
_NONE = -1


@dataclass(frozen=True, slots=True)
class Link:
    index: int
    name: str
    mac: str
    master: int = 0  # the index of its bridge
    peer: int = 0  # the index of its other end, there
    namespace: int = _NONE  # the number by which this namespace knows the other end's


def read_link(body: bytes) -> Link:
    found = attributes_of(body[_LINK.size :])

    def number(kind: int, otherwise: int = 0) -> int:
        return int(struct.unpack("=i", found[kind])[0]) if kind in found else otherwise

    name = found.get(_NAME, b"").rstrip(b"\0").decode(errors="replace")
    mac = found.get(_MAC, b"").hex(":")
    index: int = _LINK.unpack_from(body)[2]
    return Link(index, name, mac, number(_MASTER), number(_PEER), number(_PEER_NAMESPACE, _NONE))


def list_links(kernel: NetlinkSocket) -> list[Link]:
    return [read_link(body) for body in kernel.dump(Message(_GETLINK, _LINK.pack(0, 0, 0, 0, 0)))]


def number_of(kernel: NetlinkSocket, namespace: int) -> int:
    """The number of the namespace with that descriptor; -1: it has none, so no interface here leads there."""
    body = kernel.ask(Message(_GETNSID, _GENERIC.pack(0) + attribute(_NSID_DESCRIPTOR, struct.pack("=I", namespace))))
    found = attributes_of(body[_GENERIC.size :])
    return int(struct.unpack("=i", found[_NSID])[0]) if _NSID in found else _NONE


def look_into(kernel: NetlinkSocket, namespace: int, index: int) -> Link:
    """An interface of another namespace, by that namespace's number."""
    body = _LINK.pack(0, 0, index, 0, 0) + attribute(_TARGET_NAMESPACE, struct.pack("=i", namespace))
    return read_link(kernel.ask(Message(_GETLINK, body)))


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def add_service_address(index: int, address: Address) -> Message:
    """An address to be reached at, which the machine never speaks from by itself."""
    head = _ADDRESS.pack(_family(address), address.max_prefixlen, 0, _ON_HOST, index)
    return Message(
        _NEWADDR, head + attribute(_ADDR_ADDRESS, address.packed) + attribute(_ADDR_LOCAL, address.packed), CREATE
    )


def add_host_route(index: int, address: Address) -> Message:
    """This one address is there; more than any route to its network, and instead of one that says so already."""
    head = _ROUTE.pack(_family(address), address.max_prefixlen, 0, 0, _MAIN, _STATIC, _ON_LINK, _UNICAST, 0)
    body = head + attribute(_DESTINATION, address.packed) + attribute(_OUT, struct.pack("=I", index))
    return Message(_NEWROUTE, body, _REPLACE)


def set_neighbour(index: int, address: Address, mac: str) -> Message:
    head = _NEIGHBOUR.pack(_family(address), index, _PERMANENT, 0, 0)
    known = attribute(_NEIGHBOUR_ADDRESS, address.packed)
    return Message(_NEWNEIGH, head + known + attribute(_NEIGHBOUR_MAC, bytes.fromhex(mac.replace(":", ""))), _REPLACE)


def answer_for(index: int, address: Address) -> Message:
    """Neighbours on that interface who ask for the address are told that it is here."""
    head = _NEIGHBOUR.pack(_family(address), index, _PERMANENT, _PROXY, 0)
    return Message(_NEWNEIGH, head + attribute(_NEIGHBOUR_ADDRESS, address.packed), CREATE)


def answer_no_more(index: int, address: Address) -> Message:
    head = _NEIGHBOUR.pack(_family(address), index, 0, _PROXY, 0)
    return Message(_DELNEIGH, head + attribute(_NEIGHBOUR_ADDRESS, address.packed))
