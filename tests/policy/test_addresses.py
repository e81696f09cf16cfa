"""Every spelling of an address is judged as the place it leads to."""

from __future__ import annotations

import itertools
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.policy import FORBIDDEN, GLOBAL, AddressKind, Network, kind_of, may_answer, may_list


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", AddressKind.PUBLIC),
        ("2606:4700::1", AddressKind.PUBLIC),
        ("10.1.2.3", AddressKind.PRIVATE),
        ("172.16.0.1", AddressKind.PRIVATE),
        ("192.168.1.1", AddressKind.PRIVATE),
        ("100.64.0.1", AddressKind.PRIVATE),
        ("198.18.0.1", AddressKind.PRIVATE),
        ("203.0.113.80", AddressKind.PRIVATE),
        ("fd00::1", AddressKind.PRIVATE),
        ("fec0::1", AddressKind.PRIVATE),
        ("2001:db8::1", AddressKind.PRIVATE),
        ("169.254.1.1", AddressKind.LINK_LOCAL),
        ("fe80::1", AddressKind.LINK_LOCAL),
        ("fe80::1%eth0", AddressKind.LINK_LOCAL),
        ("127.9.9.9", AddressKind.LOOPBACK),
        ("::1", AddressKind.LOOPBACK),
        ("169.254.169.254", AddressKind.METADATA),
        ("169.254.170.2", AddressKind.METADATA),
        ("100.100.100.200", AddressKind.METADATA),
        ("192.0.0.192", AddressKind.METADATA),
        ("168.63.129.16", AddressKind.METADATA),
        ("fd00:ec2::254", AddressKind.METADATA),
        ("fd00:ec2::254%1", AddressKind.METADATA),
        ("fd20:ce::254", AddressKind.METADATA),
        ("0.0.0.0", AddressKind.UNUSABLE),
        ("0.9.9.9", AddressKind.UNUSABLE),
        ("224.0.0.1", AddressKind.UNUSABLE),
        ("240.0.0.1", AddressKind.UNUSABLE),
        ("255.255.255.255", AddressKind.UNUSABLE),
        ("::", AddressKind.UNUSABLE),
        ("ff02::1", AddressKind.UNUSABLE),
        ("::8.8.8.8", AddressKind.UNUSABLE),
        ("4000::1", AddressKind.UNUSABLE),
        ("64:ff9b:1:7f00:0:100::", AddressKind.UNUSABLE),
        # server 127.0.0.1, then client 169.254.169.254, then both public
        ("2001:0:7f00:1:0:0:f7f7:f7f7", AddressKind.LOOPBACK),
        ("2001:0:808:808:0:0:5601:5601", AddressKind.METADATA),
        ("2001:0:808:808:0:0:f7f7:f7f7", AddressKind.UNUSABLE),
    ],
)
def test_kinds(address: str, kind: AddressKind) -> None:
    assert kind_of(ip_address(address)) is kind


INTERESTING_4 = [str(network.network_address) for network in FORBIDDEN if isinstance(network, IPv4Network)]
ADDRESSES_4 = st.ip_addresses(v=4) | st.sampled_from([IPv4Address(text) for text in INTERESTING_4])


@given(ADDRESSES_4)
def test_an_ipv4_address_within_an_ipv6_address_decides(address: IPv4Address) -> None:
    number = int(address)
    for prefix in ("::ffff:0:0", "64:ff9b::", "64:ff9b:1::"):
        assert kind_of(IPv6Address(int(IPv6Address(prefix)) | number)) is kind_of(address)
    assert kind_of(IPv6Address(int(IPv6Address("2002::1")) | number << 80)) is kind_of(address)


def test_who_may_answer() -> None:
    may = {kind: (plain, registry) for kind, plain, registry in (
        (AddressKind.PUBLIC, True, True),
        (AddressKind.PRIVATE, False, True),
        (AddressKind.LINK_LOCAL, False, False),
        (AddressKind.LOOPBACK, False, False),
        (AddressKind.METADATA, False, False),
        (AddressKind.UNUSABLE, False, False),
    )}  # fmt: skip
    assert set(may) == set(AddressKind)
    for text in ("8.8.8.8", "10.0.0.1", "169.254.1.1", "127.0.0.1", "169.254.169.254", "0.0.0.0", "fd00:ec2::254"):
        address = ip_address(text)
        assert (may_answer(address, registry=False), may_answer(address, registry=True)) == may[kind_of(address)]


NAT64 = IPv6Network("64:ff9b::/32")  # Python looks at the address within only in newer versions


def find_edges(networks: tuple[Network, ...]) -> list[IPv4Address | IPv6Address]:
    return [
        ip_address(int(edge) + step) if edge.version == 4 else IPv6Address(int(edge) + step)
        for network in networks
        for edge, step in ((network.network_address, 0), (network.broadcast_address, 0),
                           (network.network_address, -1), (network.broadcast_address, 1))
        if 0 <= int(edge) + step < 1 << network.max_prefixlen
    ]  # fmt: skip


EDGES = find_edges(FORBIDDEN)


@given(st.ip_addresses() | st.sampled_from(EDGES))
def test_the_forbidden_blocks_are_what_may_not_be_listed(address: IPv4Address | IPv6Address) -> None:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return  # no packet carries one
    assert any(address in network for network in FORBIDDEN) == (not may_list(address))


@pytest.mark.parametrize("networks", [FORBIDDEN, GLOBAL], ids=["forbidden", "global"])
def test_blocks_are_disjoint(networks: tuple[Network, ...]) -> None:
    for version in (4, 6):
        blocks = sorted((int(n.network_address), int(n.broadcast_address)) for n in networks if n.version == version)
        assert blocks
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(blocks))


@given(st.ip_addresses() | st.sampled_from([*EDGES, *find_edges(GLOBAL)]))
def test_the_global_blocks_are_what_is_public(address: IPv4Address | IPv6Address) -> None:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return  # no packet carries one
    public = kind_of(address) is AddressKind.PUBLIC
    assert any(address in network for network in GLOBAL) == public
    if public and not (isinstance(address, IPv6Address) and (address.sixtofour or address in NAT64)):
        assert address.is_global, "nothing is public here that Python calls private"
