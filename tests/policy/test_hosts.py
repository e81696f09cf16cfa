"""Who is on a list, and whether one list is within another: by example, and against naive oracles."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.policy import (
    EVERYTHING,
    NOTHING,
    AddressKind,
    HostList,
    InvalidEntry,
    canonical_name,
    common,
    excess,
    is_metadata_name,
    kind_of,
    may_list,
)

# Few labels and small corners of the address space, so that things meet.
LABELS = st.sampled_from(["a", "b", "com", "evil", "xn--bcher-kva", "a-b", "metadata"])
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.sampled_from(["", ":80", ":443", ":8443"])
ADDRESSES_4 = st.integers(0, 255).map(lambda low: IPv4Address(0x0A000000 | low)) | st.ip_addresses(v=4)
ADDRESSES_6 = st.integers(0, 255).map(lambda low: IPv6Address(0x20010DB8 << 96 | low)) | st.ip_addresses(v=6)
ADDRESSES = ADDRESSES_4 | ADDRESSES_6


def write_block(address: IPv4Address | IPv6Address, length: int, port: str) -> str:
    if isinstance(address, IPv4Address):
        return f"{IPv4Network((address, length % 33), strict=False)}{port}"
    return f"[{IPv6Network((address, length % 129), strict=False)}]{port}"


BLOCKS = st.builds(write_block, ADDRESSES, st.integers(0, 128) | st.integers(24, 32), PORTS)
NAMED = st.builds(lambda star, name, port: f"{star}{name}{port}", st.sampled_from(["", "*."]), NAMES, PORTS)
ENTRIES = NAMED | BLOCKS | st.just("*")


def keep_valid(texts: list[str]) -> HostList:
    hosts = NOTHING
    for text in texts:
        try:
            hosts = hosts.plus(HostList.parse([text]))
        except InvalidEntry:
            continue
    return hosts


LISTS = st.lists(ENTRIES, max_size=6).map(keep_valid)


def reaches_name(hosts: HostList, name: str, port: int) -> bool:
    return any(port in entry.ports or entry == EVERYTHING for entry in hosts.entries_for_name(name))


def reaches_address(hosts: HostList, address: IPv4Address | IPv6Address, port: int) -> bool:
    return any(port in entry.ports or entry == EVERYTHING for entry in hosts.entries_for_address(address))


@given(LISTS, st.randoms())
def test_parsing_what_was_printed_gives_the_same_list_in_any_order(hosts: HostList, random: object) -> None:
    texts = list(hosts.texts)
    random.shuffle(texts)  # type: ignore[attr-defined]
    assert HostList.parse([*texts, *texts]) == hosts
    assert HostList.parse(texts).texts == hosts.texts


@given(st.text() | st.text(alphabet="a.*:[]/%@-_0123456789x\0 。ü\uff11", max_size=20) | ENTRIES)
def test_any_text_is_an_entry_or_an_invalid_entry(text: str) -> None:
    try:
        hosts = HostList.parse([text])
    except InvalidEntry as fault:
        words: tuple[str, ...] = (fault.cause, fault.hint)
    else:
        words = hosts.texts * 2
        assert HostList.parse(hosts.texts) == hosts
        assert hosts.texts[0].isascii()
    assert all(words)


@given(st.text() | NAMES)
def test_the_canonical_form_of_a_name_is_its_own(text: str) -> None:
    try:
        name = canonical_name(text)
    except InvalidEntry:
        return
    assert canonical_name(name) == canonical_name(name.upper()) == canonical_name(name + ".") == name


@given(LISTS, NAMES)
def test_names_match_as_text_says(hosts: HostList, name: str) -> None:
    expected = set()
    for text in hosts.texts:
        host = text if text.count(":") > 1 else text.partition(":")[0]
        if host in (name, "*") or (host.startswith("*.") and name.endswith(host[1:]) and name != host[2:]):
            expected.add(text)
    if is_metadata_name(name):
        expected = set()
    assert {str(entry) for entry in hosts.entries_for_name(name)} == expected


@given(LISTS, ADDRESSES)
def test_addresses_match_by_number(hosts: HostList, address: IPv4Address | IPv6Address) -> None:
    def within(network: IPv4Network | IPv6Network) -> bool:
        low = int(network.network_address)
        return network.version == address.version and low <= int(address) <= low | int(network.hostmask)

    matched = {entry for entry in hosts.entries if entry.network is not None and within(entry.network)}
    if kind_of(address) is AddressKind.PUBLIC:
        matched |= {EVERYTHING} & set(hosts.entries)
    if address.version == 6 and IPv6Address(int(address)).ipv4_mapped is not None:
        return  # judged as IPv4, see below
    assert set(hosts.entries_for_address(address)) == (matched if may_list(address) else set())


def test_a_mapped_address_is_the_ipv4_address() -> None:
    hosts = HostList.parse(["192.0.2.0/24"])
    assert hosts.entries_for_address(ip_address("::ffff:192.0.2.7")) == hosts.entries
    assert HostList.parse(["::/0"]).entries_for_address(ip_address("::ffff:192.0.2.7")) == ()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.255", "169.254.169.254", "169.254.0.1", "100.100.100.200", "168.63.129.16",
        "192.0.0.192", "0.0.0.0", "0.1.2.3", "224.0.0.251", "255.255.255.255", "::1", "::", "fe80::1", "ff02::fb",
        "fd00:ec2::254", "fd20:ce::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::7f00:1", "2002:7f00:1::", "::127.0.0.1",
    ],
)  # fmt: skip
def test_a_list_of_everything_does_not_open_what_no_list_opens(address: str) -> None:
    assert HostList.parse(["0.0.0.0/0", "::/0", "*"]).entries_for_address(ip_address(address)) == ()


def test_everything_is_every_name_and_every_public_address_and_nothing_private() -> None:
    hosts = HostList.parse(["*"])
    for name in ("example.com", "a.b.c.example.com", "intranet", "xn--bcher-kva.example"):
        assert hosts.entries_for_name(name) == (EVERYTHING,)
    for name in ("metadata.google.internal", "x.metadata.goog", "localhost", "a.localhost"):
        assert hosts.entries_for_name(name) == ()
    for text in ("8.8.8.8", "2606:4700::1", "64:ff9b::808:808", "2002:808:808::1"):
        assert hosts.entries_for_address(ip_address(text)) == (EVERYTHING,)
    for text in ("10.0.0.1", "100.64.0.1", "192.168.1.1", "198.18.0.1", "fd00::1", "2001:db8::1", "64:ff9b::a00:1"):
        assert hosts.entries_for_address(ip_address(text)) == ()


def test_lookalikes_are_not_on_the_list() -> None:
    hosts = HostList.parse(["allowed.com", "*.wild.com"])
    for name in ("allowed.com.evil.com", "notallowed.com", "allowed.co", "www.allowed.com", "allowed.com.",
                 "wild.com", "notwild.com", "x.wild.com.evil.com", "allowed", "com", ""):  # fmt: skip
        assert hosts.entries_for_name(name) == ()
    assert [str(entry) for entry in hosts.entries_for_name("a.b.wild.com")] == ["*.wild.com"]


def test_the_empty_list_has_nobody() -> None:
    assert HostList.parse([]) == NOTHING
    assert NOTHING.texts == ()
    assert NOTHING.entries_for_name("example.com") == ()
    assert NOTHING.entries_for_address(ip_address("192.0.2.1")) == ()


@given(LISTS, LISTS)
def test_plus_and_minus_are_those_of_sets(one: HostList, other: HostList) -> None:
    assert set(one.plus(other).entries) == set(one.entries) | set(other.entries)
    assert set(one.minus(other).entries) == set(one.entries) - set(other.entries)
    assert one.plus(other) == other.plus(one)
    assert one.plus(other) == HostList.parse(one.texts + other.texts)


@given(LISTS, LISTS)
def test_a_part_of_a_list_is_within_it(one: HostList, other: HostList) -> None:
    assert excess(one, one) == excess(one, one.plus(other)) == excess(NOTHING, one) == ()
    assert excess(one.minus(other), one) == ()
    assert excess(one, NOTHING) == one.entries


@given(LISTS, LISTS, st.lists(NAMES, max_size=20), st.lists(ADDRESSES, max_size=20), st.sampled_from([80, 443, 8443]))
def test_a_child_within_its_parent_reaches_nothing_more(
    child: HostList, parent: HostList, names: list[str], addresses: list[IPv4Address | IPv6Address], port: int
) -> None:
    too_much = excess(child, parent)
    within = HostList(tuple(entry for entry in child.entries if entry not in too_much))
    for name in names + [prefix + entry.name for entry in child.entries if entry.name for prefix in ("", "a.", "q.q.")]:
        assert reaches_name(parent, name, port) or not reaches_name(within, name, port)
    corners = [c for e in child.entries if e.network for c in (e.network.network_address, e.network.broadcast_address)]
    for address in addresses + corners:
        assert reaches_address(parent, address, port) or not reaches_address(within, address, port)


@given(LISTS, LISTS, st.lists(NAMES, max_size=20), st.lists(ADDRESSES, max_size=20), st.sampled_from([80, 443, 8443]))
def test_what_two_lists_have_in_common_is_what_both_reach(
    one: HostList, other: HostList, names: list[str], addresses: list[IPv4Address | IPv6Address], port: int
) -> None:
    both = common(one, other)
    assert both == common(other, one)
    assert both == HostList.parse(both.texts)
    assert not excess(both, one)
    assert not excess(both, other)
    assert not excess(one, common(one, one.plus(other)))
    if EVERYTHING in (*one.entries, *other.entries):
        return
    listed = [entry.name for entry in (*one.entries, *other.entries) if entry.name]
    for name in names + [prefix + name for name in listed for prefix in ("", "a.", "q.q.")]:
        assert reaches_name(both, name, port) == (reaches_name(one, name, port) and reaches_name(other, name, port))
    corners = [c for e in both.entries if e.network for c in (e.network.network_address, e.network.broadcast_address)]
    for address in addresses + corners:
        together = reaches_address(one, address, port) and reaches_address(other, address, port)
        assert reaches_address(both, address, port) == together


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (["a.com", "b.com"], ["b.com", "c.com"], ["b.com"]),
        (["*.a.com"], ["x.a.com", "a.com"], ["x.a.com"]),
        (["a.com"], ["*.com:443"], ["a.com:443"]),
        (["10.0.0.0/8"], ["10.1.0.0/16:22", "10.2.0.0/16"], ["10.2.0.0/16"]),
        (["a.com:80", "a.com:443"], ["*.com"], ["a.com"]),
        (["*"], ["a.com", "8.8.8.8:53", "10.0.0.1"], ["a.com", "8.8.8.8:53"]),
        (["*"], ["*"], ["*"]),
        (["*"], [], []),
    ],
)
def test_common(one: list[str], other: list[str], both: list[str]) -> None:
    assert list(common(HostList.parse(one), HostList.parse(other)).texts) == both


@given(LISTS, LISTS)
def test_what_is_too_much_reaches_something_the_parent_does_not(child: HostList, parent: HostList) -> None:
    """With names nobody else has, so that only a wildcard can cover them."""
    for entry in excess(child, parent):
        if entry.name:
            name = f"only-here.{entry.name}" if entry.wildcard else entry.name
            covered = all(reaches_name(parent, name, port) for port in entry.ports)
            assert not covered or is_metadata_name(name)


@pytest.mark.parametrize(
    ("child", "parent", "too_much"),
    [
        (["a.com"], ["*.com"], []),
        (["a.com"], ["*.a.com"], ["a.com"]),
        (["*.b.a.com"], ["*.a.com"], []),
        (["*.a.com"], ["*.b.a.com", "a.com"], ["*.a.com"]),
        (["a.com:443"], ["a.com"], []),
        (["a.com"], ["a.com:443"], ["a.com"]),
        (["a.com"], ["a.com:443", "*.com:80"], []),
        (["a.com:22"], ["a.com"], ["a.com:22"]),
        (["10.0.0.1"], ["10.0.0.0/8"], []),
        (["10.0.0.0/8"], ["10.0.0.0/9"], ["10.0.0.0/8"]),
        (["10.0.0.0/8"], ["10.0.0.0/9", "10.128.0.0/9"], []),
        (["10.0.0.0/8"], ["10.0.0.0/9", "10.128.0.0/10", "10.192.0.0/10:80", "10.192.0.0/10:443"], []),
        (["10.0.0.0/8"], ["10.0.0.0/9:80", "10.128.0.0/9:443"], ["10.0.0.0/8"]),
        (["2001:db8::1"], ["::/0"], []),
        (["2001:db8::1"], ["0.0.0.0/0"], ["2001:db8::1"]),
        (["::ffff:10.0.0.1"], ["10.0.0.0/24"], []),
        (["a.com"], ["0.0.0.0/0", "::/0"], ["a.com"]),  # whose address it is decides somebody else
        (["*"], ["*"], []),
        (["*"], ["0.0.0.0/0", "::/0", "*.com"], ["*"]),
        (["a.com", "a.com:22", "*.b.com", "8.8.8.8:53", "8.0.0.0/8", "2606:4700::/32", "168.0.0.0/8"], ["*"], []),
        (
            ["10.0.0.0/8", "10.0.0.1:80", "fd00::/8", "192.0.0.0/8", "2001:db8::1"],
            ["*"],
            ["10.0.0.0/8", "10.0.0.1:80", "192.0.0.0/8", "2001:db8::1", "fd00::/8"],
        ),
        (["0.0.0.0/0"], ["*"], ["0.0.0.0/0"]),
        (["10.0.0.1", "8.8.8.8"], ["*", "10.0.0.0/8"], []),
    ],
)
def test_excess(child: list[str], parent: list[str], too_much: list[str]) -> None:
    assert [str(entry) for entry in excess(HostList.parse(child), HostList.parse(parent))] == too_much
