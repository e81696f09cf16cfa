"""Only TCP goes out, and only to what is listed: not UDP, not ICMP, nothing made by hand, not the other family."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from k8e.link.model import AGENT, ExecOptions
from tests.egress.internet import NAME_SERVER
from tests.egress.rig import Attempt, Cell, Site
from tests.egress.zones import Zone
from tests.engine.rig import ROOT

pytestmark = pytest.mark.anyio

ZONE: Zone = {"allowed.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]}}
SHUT = "!ECONNREFUSED"
REFUSALS = (SHUT, "!EHOSTUNREACH", "!ENETUNREACH", "!EACCES", "!EPERM", "!EPROTONOSUPPORT",
            "!EAFNOSUPPORT", "!ESOCKTNOSUPPORT")  # fmt: skip
WHO: dict[str, ExecOptions] = {
    "user": {}, "root": {"identity": ROOT}, "agent": {"identity": AGENT, "keep_capabilities": True}
}  # fmt: skip


@pytest.fixture(scope="module")
async def cell(site: Site) -> AsyncIterator[Cell]:
    async with site.cell("allowed.com", "45.90.40.0/24", "45.90.40.0/24:9999", "45.90.40.0/24:123") as cell:
        assert await cell.reached(("every", "allowed.com", 80), ("tcp", "45.90.40.1", 80)) == [
            ["2a0b:4340:31::1", "45.90.31.1"],
            "45.90.40.1",
        ]
        yield cell


async def test_udp_is_refused_at_once_also_where_tcp_is_allowed(cell: Cell) -> None:
    """QUIC above all: a client that is refused goes on with TCP. Only two wait for the refusal, and before all others,
    because kernels send ICMP errors to one host a few at a time and then one per second."""
    assert await cell.attempt(("udp", "45.90.31.1", 443), ("udp", "2a0b:4340:31::1", 443)) == [SHUT, SHUT]


@pytest.mark.parametrize("who", WHO)
async def test_no_datagram_leaves_the_machine(cell: Cell, who: str) -> None:
    await cell.refusals()
    cell.site.internet.clear()
    places = [(address, port) for address in ("45.90.31.2", "2a0b:4340:31::2", "45.90.40.1", NAME_SERVER)
              for port in (443, 123, 9999, 80)]  # fmt: skip
    await cell.attempt(*(("datagram", *place) for place in places), **WHO[who])
    assert cell.site.internet.notes().packets == []
    told = await cell.refused_addresses()
    assert {told[place] for place in places} == {"protocol_not_allowed"}


@pytest.mark.parametrize("who", WHO)
async def test_ping_and_packets_made_by_hand(cell: Cell, who: str) -> None:
    cell.site.internet.clear()
    attempts: list[Attempt] = [("ping", "45.90.31.1"), ("ping", "2a0b:4340:31::1")]
    attempts += [("raw", "45.90.31.1", protocol) for protocol in (1, 6, 17, 47, 132, 255)]
    attempts += [("raw", "2a0b:4340:31::1", protocol) for protocol in (58, 6, 17)]
    results = await cell.attempt(*attempts, **WHO[who])
    for attempt, result in zip(attempts, results, strict=True):
        assert result in REFUSALS or (attempt[0], result) == ("ping", "!SILENCE"), (attempt, result)
    assert cell.site.internet.notes().packets == []


@pytest.mark.parametrize("who", WHO)
async def test_sockets_below_and_beside_ip(cell: Cell, who: str) -> None:
    attempts: list[Attempt] = [
        ("socket", "AF_PACKET", "SOCK_RAW", 0x0300), ("socket", "AF_PACKET", "SOCK_DGRAM", 0x0300),
        ("socket", "AF_INET", "SOCK_RAW", 255), ("socket", "AF_INET6", "SOCK_RAW", 255),
        ("socket", "AF_INET", "SOCK_STREAM", 132), ("socket", "AF_VSOCK", "SOCK_STREAM", 0),
        ("socket", "AF_BLUETOOTH", "SOCK_RAW", 1), ("socket", "AF_CAN", "SOCK_RAW", 1),
    ]  # fmt: skip
    results = await cell.attempt(*attempts, **WHO[who])
    for attempt, result in zip(attempts, results, strict=True):
        assert result in (*REFUSALS, "!EINVAL"), (attempt, result)


async def test_ipv6_when_only_ipv4_is_listed(cell: Cell) -> None:
    cell.site.internet.clear()
    results = await cell.attempt(
        ("tcp", "2a0b:4340:40::1", 80),
        ("tcp", "64:ff9b::2d5a:2801", 80),  # 45.90.40.1 through a translator
        ("tcp", "2002:2d5a:2801::1", 80),
        ("tcp", "::45.90.40.1", 80),
    )
    assert results == [SHUT] * 4
    assert cell.site.internet.notes().packets == []


async def test_the_other_way_round(site: Site) -> None:
    async with site.cell("2a0b:4340:40::/64") as cell:
        assert await cell.reached(("tcp", "2a0b:4340:40::1", 80)) == ["2a0b:4340:40::1"]
        site.internet.clear()
        assert await cell.attempt(("tcp", "45.90.40.1", 80)) == [SHUT]
        assert site.internet.notes().packets == []


async def test_tcp_that_does_not_begin_with_a_beginning(cell: Cell) -> None:
    """TCP Fast Open carries data in the first packet: it is the list that decides, not what the packet looks like."""
    code = """
import errno, socket
for address in ("45.90.66.6", "45.90.31.1"):
    s = socket.socket()
    try:
        s.sendto(b"GET / HTTP/1.0\\r\\n\\r\\n", 0x20000000, (address, 443 if address.endswith("6") else 80))
        print(b"45.90.31.1" in s.makefile("rb").read())
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    cell.site.internet.clear()
    done = await cell.room.python(code)
    first, second = done.stdout.split()
    assert first in (b"ECONNREFUSED", b"EOPNOTSUPP", b"ENOTCONN", b"EPIPE"), done
    assert second in (b"True", b"EOPNOTSUPP", b"ENOTCONN", b"EPIPE"), done
    assert {address for _, address, _ in cell.site.internet.notes().packets} <= {"45.90.31.1"}
