"""Kinds of addresses, and which of them a list of hosts can open.

An address that contains an IPv4 address (mapped, NAT64, 6to4, Teredo) is treated as that IPv4 address. `FORBIDDEN` has
the blocks that `may_list` refuses, for kernel rules that come before every list; `GLOBAL` has the blocks of kind
PUBLIC. The tables are our own, because those of `ipaddress` change between versions of Python, and a name, a rule and a
parent's list have to agree. No address that `ipaddress` calls not global is public here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, collapse_addresses
from typing import TypeVar

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
N = TypeVar("N", IPv4Network, IPv6Network)


class AddressKind(enum.Enum):
    PUBLIC = "public"
    PRIVATE = "private"  # also what is not reachable from everywhere for other reasons: documentation, tests, shared
    LINK_LOCAL = "link_local"
    LOOPBACK = "loopback"
    METADATA = "metadata"  # of cloud providers
    UNUSABLE = "unusable"  # unspecified, multicast, broadcast, reserved


_METADATA_4 = tuple(
    IPv4Network(text)
    for text in (
        "169.254.169.254",  # most providers
        "169.254.170.2",  # credentials of container tasks
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",  # a public address that the machine's own network answers
    )
)
_METADATA_6 = tuple(IPv6Network(text) for text in ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254"))
_LOOPBACK_4 = IPv4Network("127.0.0.0/8")
_LINK_LOCAL_4 = IPv4Network("169.254.0.0/16")
_UNUSABLE_4 = (IPv4Network("0.0.0.0/8"), IPv4Network("224.0.0.0/4"), IPv4Network("240.0.0.0/4"))

_PRIVATE_4 = tuple(
    IPv4Network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        "100.64.0.0/10",  # shared by the customers of a provider
        "192.0.0.0/24",  # protocols' own
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
        "198.18.0.0/15",  # benchmarks
    )
)

_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/96")  # of 64:ff9b:1::/48 the part whose last 32 bits are the address
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_LINK_LOCAL_6 = IPv6Network("fe80::/10")
_LOOPBACK_6 = IPv6Address("::1")
# Addresses that can be endpoints; all others are unspecified, multicast or unassigned.
_UNICAST_6 = tuple(IPv6Network(text) for text in ("2000::/3", "fc00::/7", "fe80::/10", "fec0::/10"))

_PRIVATE_6 = tuple(
    IPv6Network(text)
    for text in (
        "fc00::/7",
        "fec0::/10",  # site-local, as private addresses once were
        "2001::/23",  # protocols' own; Teredo, which is among them, is looked at before
        *("2001:db8::/32", "3fff::/20"),  # documentation
    )
)

_LISTABLE = frozenset({AddressKind.PUBLIC, AddressKind.PRIVATE})


def plain(address: Address) -> Address:
    """Returns the IPv4 address of one written as IPv6: the kernel sends such connections over IPv4."""
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def plain_network(network: Network) -> Network:
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


def kind_of(address: Address) -> AddressKind:
    return _kind_of_4(address) if isinstance(address, IPv4Address) else _kind_of_6(address)


def may_answer(address: Address, *, registry: bool) -> bool:
    """Whether a listed name may resolve to it. A registry of the machine's own configuration may be private."""
    kind = kind_of(address)
    return kind is AddressKind.PUBLIC or (registry and kind is AddressKind.PRIVATE)


def may_list(address: Address) -> bool:
    """Whether a list may name it: private ones yes, loopback, link-local and metadata never."""
    return kind_of(address) in _LISTABLE


def is_forbidden(network: Network) -> bool:
    """Whether no list can open any address of the block."""
    network = plain_network(network)
    return any(_within(network, forbidden) for forbidden in FORBIDDEN)


def _within(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def _kind_of_4(address: IPv4Address) -> AddressKind:
    if any(address in network for network in _METADATA_4):
        return AddressKind.METADATA
    if address in _LOOPBACK_4:
        return AddressKind.LOOPBACK
    if address in _LINK_LOCAL_4:
        return AddressKind.LINK_LOCAL
    if any(address in network for network in _UNUSABLE_4):
        return AddressKind.UNUSABLE
    return AddressKind.PRIVATE if any(address in network for network in _PRIVATE_4) else AddressKind.PUBLIC


def _kind_of_6(address: IPv6Address) -> AddressKind:
    address = IPv6Address(int(address))  # without a zone, which would make it unequal to itself
    if address in _MAPPED or address in _NAT64 or address in _LOCAL_NAT64:
        return _kind_of_4(IPv4Address(int(address) & 0xFFFF_FFFF))
    if address in _SIX_TO_FOUR:
        return _kind_of_4(IPv4Address(int(address) >> 80 & 0xFFFF_FFFF))
    if address in _TEREDO:
        # A tunnel from one address to another, never a server: unusable, unless it leads to something worse.
        server, client = (int(address) >> 64 & 0xFFFF_FFFF, ~int(address) & 0xFFFF_FFFF)
        kinds = {_kind_of_4(IPv4Address(number)) for number in (server, client)}
        return next((kind for kind in _WORST if kind in kinds), AddressKind.UNUSABLE)
    if any(address in network for network in _METADATA_6):
        return AddressKind.METADATA
    if address == _LOOPBACK_6:
        return AddressKind.LOOPBACK
    if address in _LINK_LOCAL_6:
        return AddressKind.LINK_LOCAL
    if not any(address in network for network in _UNICAST_6):
        return AddressKind.UNUSABLE
    return AddressKind.PRIVATE if any(address in network for network in _PRIVATE_6) else AddressKind.PUBLIC


_WORST = (AddressKind.METADATA, AddressKind.LOOPBACK, AddressKind.LINK_LOCAL)


def _excluding(network: N, holes: Iterable[N]) -> list[N]:
    rest = [network]
    for hole in holes:
        rest = [
            part
            for block in rest
            for part in (
                block.address_exclude(hole) if hole.subnet_of(block) else () if block.subnet_of(hole) else [block]
            )
        ]
    return rest


def _forbidden_6(forbidden_4: Iterable[IPv4Network]) -> Iterator[IPv6Network]:
    yield from _excluding(IPv6Network("::/0"), (*_UNICAST_6, _NAT64, _LOCAL_NAT64))
    yield from (*_METADATA_6, _LINK_LOCAL_6, _TEREDO)
    yield from _embedding(forbidden_4)


def _embedding(networks: Iterable[IPv4Network]) -> Iterator[IPv6Network]:
    """Returns the blocks of IPv6 that contain an address of these IPv4 blocks."""
    for network in networks:
        number = int(network.network_address)
        for prefix in (_NAT64, _LOCAL_NAT64):
            yield IPv6Network((int(prefix.network_address) | number, 96 + network.prefixlen))
        yield IPv6Network((int(_SIX_TO_FOUR.network_address) | number << 80, 16 + network.prefixlen))


_FORBIDDEN_4 = tuple(collapse_addresses((*_METADATA_4, _LOOPBACK_4, _LINK_LOCAL_4, *_UNUSABLE_4)))

# Disjoint blocks of both families: exactly what `may_list` refuses, but for mapped addresses, which no packet carries.
FORBIDDEN: tuple[Network, ...] = (*_FORBIDDEN_4, *collapse_addresses(_forbidden_6(_FORBIDDEN_4)))

_GLOBAL_4 = tuple(collapse_addresses(_excluding(IPv4Network("0.0.0.0/0"), (*_FORBIDDEN_4, *_PRIVATE_4))))
_GLOBAL_6 = _excluding(IPv6Network("2000::/3"), (*_PRIVATE_6, _SIX_TO_FOUR))

# Disjoint blocks of both families: exactly what is PUBLIC, but for mapped addresses.
GLOBAL: tuple[Network, ...] = (*_GLOBAL_4, *collapse_addresses((*_GLOBAL_6, *_embedding(_GLOBAL_4))))

# Blocks of both families: what a list can open, but not by a name.
PRIVATE: tuple[Network, ...] = (*_PRIVATE_4, *collapse_addresses((*_PRIVATE_6, *_embedding(_PRIVATE_4))))


def is_global(network: Network) -> bool:
    """Whether every address of the block that a list can open is PUBLIC."""
    network = plain_network(network)
    return not any(network.version == each.version and network.overlaps(each) for each in PRIVATE)
