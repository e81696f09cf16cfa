"""Hosts that are not on the list are refused at once, with a reason, and no packet to them leaves the machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Unpack

import pytest

from k8e.link.model import AGENT, ExecOptions
from tests.egress.internet import GATEWAY4, HOST4, NAME_SERVER, OTHER_NAME_SERVER
from tests.egress.rig import Attempt, Cell, Site
from tests.egress.zones import Zone
from tests.engine.rig import ROOT

pytestmark = pytest.mark.anyio

LOOPBACK, PRIVATE, LINK_LOCAL, METADATA = "127.0.0.1", "10.66.0.9", "169.254.7.7", "169.254.169.254"
# Names on the list whose answers lead to places that are not.
REBINDING: Zone = {
    "to-loopback.com": {"A": [LOOPBACK, "127.1.2.3"], "AAAA": ["::1"]},
    "to-private.com": {"A": [PRIVATE, "192.168.0.1", "172.16.5.4", "100.64.0.1"], "AAAA": ["fd00::1", "fec0::1"]},
    "to-link-local.com": {"A": [LINK_LOCAL], "AAAA": ["fe80::1"]},
    "to-metadata.com": {"A": [METADATA, "100.100.100.200", "168.63.129.16"], "AAAA": ["fd00:ec2::254"]},
    "to-mapped.com": {"AAAA": ["::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1"]},
    "to-translated.com": {"AAAA": ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1", "2002:a00:1::1"]},
    "to-nowhere.com": {"A": ["0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1"], "AAAA": ["::", "ff02::1"]},
    "to-the-machine.com": {"A": ["10.203.0.1", GATEWAY4.replace("45.90", "192.168")]},
    "alias-to-private.com": {"CNAME": "hidden.net"},
    "hidden.net": {"A": [PRIVATE]},
}
ZONE: Zone = {
    "allowed.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]},
    "other.com": {"A": ["45.90.31.2"]},
    "evil.com": {"A": ["45.90.66.6"], "TXT": ['"evil"']},
    "allowed.com.evil.com": {"A": ["45.90.66.6"]},
    "notallowed.com": {"A": ["45.90.66.6"]},
    "www.allowed.com": {"A": ["45.90.66.6"]},
    "xn--llowed-cvc.com": {"A": ["45.90.66.6"]},
    "metadata.google.internal": {"A": [METADATA]},
    "x.evil.internal": {"A": ["45.90.66.6"]},
    **REBINDING,
}
SHUT = "!ECONNREFUSED"
UNKNOWN = "!EAI_NONAME"

EVERYBODY = pytest.mark.parametrize(
    "options", [{}, {"identity": ROOT}, {"identity": AGENT, "keep_capabilities": True}], ids=["user", "root", "agent"]
)


@pytest.fixture(scope="module")
async def cell(site: Site) -> AsyncIterator[Cell]:
    """The usual list: some names."""
    async with site.cell("allowed.com", "*.evil.internal", *REBINDING) as cell:
        yield cell


@pytest.fixture(scope="module")
async def open_cell(site: Site) -> AsyncIterator[Cell]:
    """As much as a list can say."""
    ports = ("", ":22", ":53", ":853", ":8080")
    blocks = [f"0.0.0.0/0{port}" for port in ports] + [f"[::/0]{port}" for port in ports]
    async with site.cell(*blocks, "*.internal", "*.com", "*.net", "*.localhost.example") as cell:
        yield cell


async def expect_refused(cell: Cell, attempts: dict[Attempt, Any], **options: Unpack[ExecOptions]) -> None:
    """That each fails as said, and that the wire stays silent. The control: the machine itself gets answers there,
    see test_internet.py."""
    cell.site.internet.clear()
    results = await cell.reached(*attempts, **options)
    assert dict(zip(attempts, results, strict=True)) == attempts
    assert cell.site.internet.notes().packets == []


async def test_an_empty_list_refuses_everything_and_says_so(site: Site) -> None:
    async with site.cell() as cell:
        await expect_refused(
            cell,
            {
                ("tcp", "allowed.com", 80): UNKNOWN,
                ("tcp", "nobody.com", 443): UNKNOWN,
                ("tcp", "45.90.31.1", 80): SHUT,
                ("tcp", "45.90.31.1", 443): SHUT,
                ("tcp", "45.90.31.1", 22): SHUT,
                ("tcp", "2a0b:4340:31::1", 443): SHUT,
                ("tcp", NAME_SERVER, 80): SHUT,
                ("udp", "45.90.31.1", 443): SHUT,
            },
        )
        told = await cell.refusals()
        names = {each.host: each.reason for each in told if not each.address}
        assert names == {"allowed.com": "name_not_listed", "nobody.com": "name_not_listed"}
        addresses = {(each.address, each.port): each.reason for each in told if each.address}
        assert addresses == {
            ("45.90.31.1", 80): "address_not_listed",
            ("45.90.31.1", 443): "address_not_listed",
            ("45.90.31.1", 22): "address_not_listed",
            ("2a0b:4340:31::1", 443): "address_not_listed",
            (NAME_SERVER, 80): "address_not_listed",
        } | {("45.90.31.1", 443): addresses[("45.90.31.1", 443)]}
        assert await cell.refusals() == []  # each is told once


async def test_names_that_only_look_like_a_listed_one(cell: Cell) -> None:
    await cell.refusals()
    names = (
        "allowed.com.evil.com", "notallowed.com", "evil.com", "EVIL.com", "evil.com.", "Allowed.Com.Evil.Com.",
        "www.allowed.com", "allowed.co", "allowed", "com", "xn--llowed-cvc.com", "\u00e0llowed.com",
    )  # fmt: skip
    await expect_refused(cell, dict.fromkeys((("lookup", name) for name in names), UNKNOWN))
    told = await cell.refused_names()
    for name in names:
        ascii_name = (
            name.lower().rstrip(".").encode("idna").decode() if not name.isascii() else name.lower().rstrip(".")
        )
        assert told[ascii_name] == "name_not_listed", told


async def test_names_that_are_none(cell: Cell) -> None:
    """In packets made by hand: resolvers do not let these through."""
    odd = (["allowed.com\0", "evil", "com"], ["allowed\0", "com"], ["allowed.com"], ["all\x07owed", "com"],
           ["allowed com"], ["\xff\xfe", "evil", "com"], ["a" * 63] * 3 + ["evil", "com"],
           ["2130706433"], ["0x7f", "1"], ["127", "0", "0", "1"], ["*", "evil", "com"])  # fmt: skip
    attempts: list[Attempt] = [
        ("dns", "", labels, kind, way) for labels in odd for kind, way in (("A", "udp"), ("TXT", "tcp"))
    ]
    cell.site.internet.clear()
    for attempt, result in zip(attempts, await cell.attempt(*attempts), strict=True):
        assert result["rcode"] in (1, 3, 5), (attempt, result)
        assert result["answers"] == 0, (attempt, result)
    assert cell.site.internet.notes().packets == []


async def test_addresses_in_every_spelling(cell: Cell) -> None:
    """Of a host, by name unknown; of the machine; of no host."""
    await expect_refused(
        cell,
        {
            ("tcp", "45.90.66.6", 80): SHUT,
            ("numeric", "760889862", 80): SHUT,
            ("numeric", "0x2d5a4206", 443): SHUT,
            ("numeric", "055.0132.0102.06", 80): SHUT,
            ("numeric", "45.90.16902", 80): SHUT,
            ("mapped", "::ffff:45.90.66.6", 80): SHUT,
            ("mapped", "::ffff:2d5a:4206", 443): SHUT,
            ("tcp", "2a0b:4340:66::6", 80): SHUT,
            ("tcp", "64:ff9b::2d5a:4206", 80): SHUT,
            ("tcp", "2002:2d5a:4206::1", 80): SHUT,
            ("tcp", "45.90.31.1", 8080): SHUT,
        },
    )


async def test_an_address_that_another_sandbox_may_reach(site: Site, cell: Cell) -> None:
    async with site.cell("other.com") as other:
        assert await other.reached(("tcp", "other.com", 80)) == ["45.90.31.2"]
        await expect_refused(cell, {("tcp", "45.90.31.2", 80): SHUT, ("lookup", "other.com"): UNKNOWN})
        # The other way round as well, while both lists are in use.
        assert await cell.reached(("every", "allowed.com", 80)) == [["2a0b:4340:31::1", "45.90.31.1"]]
        await expect_refused(other, {("tcp", "45.90.31.1", 80): SHUT, ("lookup", "allowed.com"): UNKNOWN})


@EVERYBODY
async def test_questions_to_another_resolver(cell: Cell, options: ExecOptions) -> None:
    """Whichever server is asked, nothing leaves the machine."""
    labels = ["secret", "evil", "com"]
    tunnel = ["x" * 63, "y" * 63, "z" * 63, "evil", "com"]
    attempts: list[Attempt] = [
        ("dns", server, name, kind, transport)
        for server in (OTHER_NAME_SERVER, NAME_SERVER, "2a0b:4340:53::53", GATEWAY4, "127.0.0.53")
        for name, kind, transport in (
            (labels, "A", "udp"), (labels, "TXT", "tcp"), (tunnel, "TXT", "udp"), (labels, "ANY", "udp"),
            (labels, "A", "tls"), (tunnel, "NULL", "tcp"),
        )
    ]  # fmt: skip
    cell.site.internet.clear()
    results = await cell.attempt(*attempts, **options)
    for attempt, result in zip(attempts, results, strict=True):
        refused = isinstance(result, str) and result in (SHUT, "!EHOSTUNREACH", "!ENETUNREACH", "!EACCES", "!EPERM")
        assert refused or (result["rcode"] in (3, 5) and result["answers"] == 0), (attempt, result)
        if attempt[4] == "tls":
            assert refused, (attempt, result)
    notes = cell.site.internet.notes()
    assert (notes.questions, notes.packets) == ([], [])


async def test_tunnels_below_a_name_that_is_not_listed(cell: Cell) -> None:
    attempts: list[Attempt] = [
        ("dns", "", [f"{number:060d}", "data", *domain], kind, transport)
        for number in range(3)
        for domain in (["evil", "com"], ["allowed", "com"], ["allowed", "com", "evil", "com"])
        for kind, transport in (("A", "udp"), ("AAAA", "tcp"), ("TXT", "udp"), ("ANY", "tcp"))
    ]
    cell.site.internet.clear()
    assert await cell.attempt(*attempts) == [{"rcode": 3, "answers": 0}] * len(attempts)
    assert cell.site.internet.notes().packets == []


async def test_the_sandboxs_own_files_change_nothing(site: Site) -> None:
    """Its root may write what it likes into /etc/hosts and resolv.conf."""
    async with site.cell("allowed.com") as cell:
        hosts = f"45.90.66.6 allowed.com evil.com\n{METADATA} www.allowed.com\n{HOST4} machine.com\n"
        await expect_refused(
            cell,
            {
                ("write", "/etc/hosts", hosts): len(hosts),
                ("tcp", "allowed.com", 80): SHUT,
                ("tcp", "evil.com", 443): SHUT,
                ("tcp", "www.allowed.com", 80): SHUT,
                ("tcp", "machine.com", 80): SHUT,
            },
            identity=ROOT,
        )
        server = f"nameserver {OTHER_NAME_SERVER}\nsearch evil.com\n"
        cell.site.internet.clear()
        got = await cell.attempt(
            ("write", "/etc/hosts", "127.0.0.1 localhost\n"),
            ("write", "/etc/resolv.conf", server),
            ("lookup", "evil.com"),
            ("lookup", "allowed.com"),
            identity=ROOT,
        )
        assert got[2] == UNKNOWN
        # Answered by the machine's resolver as ever, or not at all: never by the one that was written there.
        assert got[3] in (["2a0b:4340:31::1", "45.90.31.1"], "!EAI_AGAIN", UNKNOWN)
        notes = cell.site.internet.notes()
        assert notes.names <= {"allowed.com"}
        assert {packet for packet in notes.packets if packet[1] != NAME_SERVER} == set()


@pytest.mark.parametrize("name", [name for name in REBINDING if name != "hidden.net"])
async def test_a_listed_name_with_an_answer_that_no_list_opens(cell: Cell, name: str) -> None:
    """The wire carries the question for the name and nothing else."""
    await cell.refusals()
    cell.site.internet.clear()
    got = await cell.attempt(
        ("lookup", name),
        ("tcp", name, 80),
        ("dns", "", name.split("."), "A"),
        ("dns", "", name.split("."), "AAAA", "tcp"),
    )
    assert [result for result in got[:2] if not str(result).startswith("!EAI_")] == []
    assert [result["answers"] for result in got[2:]] == [0, 0]
    notes = cell.site.internet.notes()
    assert notes.connections == []
    assert {(protocol, address) for protocol, address, _ in notes.packets} <= {("udp", NAME_SERVER)}
    assert (await cell.refused_names())[name] in ("address_not_public", "metadata")


async def test_an_answer_that_turns_bad(site: Site) -> None:
    """The first is public, and checked; the next, a second later, is not. What was admitted is not what comes now."""
    async with site.cell("turning.com") as turned:
        bad = ["127.0.0.1", METADATA, PRIVATE, HOST4]
        site.internet.publish({"turning.com": {"turns": [["45.90.35.1"], bad], "ttl": 1}})
        assert await turned.reached(("tcp", "turning.com", 80)) == ["45.90.35.1"]
        code = """
import socket, time
began = time.monotonic()
while time.monotonic() < began + 30:
    try:
        found = {item[4][0] for item in socket.getaddrinfo("turning.com", 80)}
    except socket.gaierror:
        found = set()
    if "45.90.35.1" not in found:
        print(sorted(found))
        break
    time.sleep(0.1)
"""
        done = await turned.room.python(code)
        assert done.stdout in (b"[]\n", b"['%b']\n" % HOST4.encode()), done
        await expect_refused(turned, dict.fromkeys((("tcp", address, 80) for address in bad), SHUT))


METADATA_PLACES = (METADATA, "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254",
                   "fd20:ce::254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1")  # fmt: skip


@pytest.mark.parametrize("profile", ["usual", "open"])
async def test_metadata_is_refused_on_every_list(cell: Cell, open_cell: Cell, profile: str) -> None:
    chosen = cell if profile == "usual" else open_cell
    await chosen.refusals()
    attempts: dict[Attempt, str] = {("tcp", address, port): SHUT for address in METADATA_PLACES for port in (80, 443)}
    attempts[("mapped", f"::ffff:{METADATA}", 80)] = SHUT
    attempts[("numeric", "0xa9fea9fe", 80)] = SHUT
    for name in ("metadata.google.internal", "METADATA.google.internal.", "metadata", "instance-data.ec2.internal"):
        attempts[("tcp", name, 80)] = UNKNOWN
    await expect_refused(chosen, attempts)
    told = await chosen.refusals()
    reasons = {each.host or each.address: each.reason for each in told}
    assert reasons["metadata.google.internal"] == "metadata"
    assert reasons[METADATA] == "metadata"
    assert reasons["fd00:ec2::254"] == "metadata"


async def test_a_list_of_everything_opens_a_lot_but_not_that(open_cell: Cell) -> None:
    """The control for the tests around: this list does open what it can."""
    got = await open_cell.reached(
        ("tcp", "45.90.66.6", 80), ("tcp", "2a0b:4340:66::6", 80), ("tcp", "evil.com", 22), ("tcp", "10.5.5.5", 80)
    )
    assert got == ["45.90.66.6", "2a0b:4340:66::6", "45.90.66.6", "10.5.5.5"]
    await expect_refused(
        open_cell,
        dict.fromkeys(
            (("tcp", address, 80) for address in ("169.254.1.1", "169.254.0.0", "240.0.0.1", "4000::1")),
            SHUT,
        ),
    )
