"""Hosts on the list can be reached, whatever shape the answer has, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.egress.rig import Attempt, Cell, Site
from tests.egress.zones import Zone

pytestmark = pytest.mark.anyio

ZONE: Zone = {
    "allowed.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]},
    "port.com": {"A": ["45.90.31.2"]},
    "a.wild.com": {"A": ["45.90.31.3"]},
    "x.y.wild.com": {"A": ["45.90.31.4"]},
    "xn--bcher-kva.wild.com": {"A": ["45.90.31.5"]},
    "wild.com": {"A": ["45.90.31.6"]},
    "chain.com": {"CNAME": "first.elsewhere.net"},
    "first.elsewhere.net": {"CNAME": "second.elsewhere.net", "ttl": 5},
    "second.elsewhere.net": {"A": ["45.90.31.7"]},
    "robin.com": {"A": ["45.90.32.1", "45.90.32.2", "45.90.32.3", "45.90.32.4"]},
    "six.com": {"AAAA": ["2a0b:4340:31::6"]},
    "big.com": {"A": [f"45.90.33.{number}" for number in range(1, 17)], "truncate": True},
    "svc.com": {"A": ["45.90.31.8"], "HTTPS": ['1 . alpn="h2" ipv4hint="45.90.31.9"'], "TXT": ['"hello"']},
    "broken.com": {"rcode": "SERVFAIL"},
    "private.com": {"A": ["10.66.0.5"]},
    "mixed.com": {"A": ["45.90.31.10", "10.66.0.6", "127.0.0.1"], "AAAA": ["::1", "fd00::1"]},
}
HOSTS = (
    "allowed.com", "port.com:8443", "*.wild.com", "chain.com", "robin.com", "six.com", "big.com", "svc.com",
    "broken.com", "nobody.com", "45.90.40.0/24", "45.90.41.7:7000", "2a0b:4340:40::/48", "10.66.0.5", "private.com",
    "mixed.com", "moving.com", "renewed.com",
)  # fmt: skip


@pytest.fixture(scope="module")
async def cell(site: Site) -> AsyncIterator[Cell]:
    async with site.cell(*HOSTS) as cell:
        yield cell


WORKS: list[tuple[Attempt, object]] = [
    (("every", "allowed.com", 80), ["2a0b:4340:31::1", "45.90.31.1"]),
    (("every", "ALLOWED.Com.", 80), ["2a0b:4340:31::1", "45.90.31.1"]),
    (("tcp", "port.com", 8443), "45.90.31.2"),
    (("tcp", "a.wild.com", 80), "45.90.31.3"),
    (("tcp", "x.y.wild.com", 80), "45.90.31.4"),
    (("tcp", "b\u00fccher.wild.com", 80), "45.90.31.5"),
    (("tcp", "xn--bcher-kva.wild.com", 80), "45.90.31.5"),
    (("tcp", "chain.com", 80), "45.90.31.7"),
    (("every", "robin.com", 80), ["45.90.32.1", "45.90.32.2", "45.90.32.3", "45.90.32.4"]),
    (("tcp", "six.com", 80), "2a0b:4340:31::6"),
    (("lookup", "big.com"), sorted(f"45.90.33.{number}" for number in range(1, 17))),
    (("tcp", "svc.com", 80), "45.90.31.8"),
    (("tcp", "45.90.40.77", 80), "45.90.40.77"),
    (("tcp", "45.90.41.7", 7000), "45.90.41.7"),
    (("mapped", "::ffff:45.90.40.78", 80), "45.90.40.78"),
    (("tcp", "2a0b:4340:40:1::9", 80), "2a0b:4340:40:1::9"),
    (("tcp", "10.66.0.5", 80), "10.66.0.5"),
    (("tcp", "private.com", 80), "10.66.0.5"),
    (("lookup", "mixed.com"), ["45.90.31.10"]),
    (("tcp", "mixed.com", 80), "45.90.31.10"),
]
FAILS: list[tuple[Attempt, object]] = [
    (("tcp", "allowed.com", 8080), "!ECONNREFUSED"),
    (("tcp", "allowed.com", 22), "!ECONNREFUSED"),
    (("tcp", "port.com", 80), "!ECONNREFUSED"),
    (("tcp", "port.com", 443), "!ECONNREFUSED"),
    (("tcp", "wild.com", 80), "!EAI_NONAME"),
    (("tcp", "second.elsewhere.net", 80), "!EAI_NONAME"),  # reached by its alias only
    (("tcp", "45.90.31.9", 443), "!ECONNREFUSED"),  # which only a hint names
    (("tcp", "nobody.com", 80), "!EAI_NONAME"),
    (("tcp", "broken.com", 80), "!EAI_AGAIN"),
    (("tcp", "45.90.41.7", 80), "!ECONNREFUSED"),
    (("tcp", "45.90.41.8", 7000), "!ECONNREFUSED"),
    (("tcp", "2a0b:4340:41::1", 80), "!ECONNREFUSED"),
    (("tcp", "10.66.0.6", 80), "!ECONNREFUSED"),
]


async def test_all_that_is_listed_works_and_nothing_else(site: Site, cell: Cell) -> None:
    expected: dict[Attempt, object] = dict((*WORKS, *FAILS))
    got = await cell.reached(*expected)
    assert dict(zip(expected, got, strict=True)) == expected


async def test_tls_to_an_allowed_name(site: Site, cell: Cell) -> None:
    authority = site.internet.authority.read_text()
    got = await cell.attempt(
        ("tls", "allowed.com", 443, authority),
        ("tls", "a.wild.com", 443, authority),
        ("tls", "chain.com", 443, authority),  # reached; its certificate is for another name
    )
    assert [got[0]["port"], got[1]["port"]] == [443, 443]
    assert got[2] == "!TLS CERTIFICATE_VERIFY_FAILED"


async def test_hints_of_other_records_do_not_lead_past_the_list(site: Site, cell: Cell) -> None:
    got = await cell.attempt(
        *(("dns", "", ["svc", "com"], kind, transport) for kind in ("HTTPS", "SVCB") for transport in ("udp", "tcp")),
        ("dns", "", ["svc", "com"], "TXT"),
        ("dns", "", ["svc", "com"], "A"),
    )
    assert got[:4] == [{"rcode": 0, "answers": 0}] * 4
    assert got[4:] == [{"rcode": 0, "answers": 1}] * 2


async def test_a_name_whose_addresses_changed(site: Site, cell: Cell) -> None:
    site.internet.publish({"moving.com": {"A": ["45.90.34.1"], "ttl": 1}})
    assert await cell.reached(("tcp", "moving.com", 80)) == ["45.90.34.1"]
    site.internet.publish({"moving.com": {"A": ["45.90.34.2"], "ttl": 1}})
    async with asyncio.timeout(30):
        while (got := await cell.reached(("tcp", "moving.com", 80))) == ["45.90.34.1"]:
            await asyncio.sleep(0.2)
    assert got == ["45.90.34.2"]


async def test_a_connection_outlives_its_names_time(site: Site, cell: Cell) -> None:
    """Of one second; looking the name up again renews it."""
    site.internet.publish({"renewed.com": {"A": ["45.90.34.3"], "ttl": 1}})
    code = """
import socket, sys, time
first = socket.create_connection(("renewed.com", 80), timeout=30)
first.sendall(b"GET /ticks HTTP/1.0\\r\\n\\r\\n")
stream = first.makefile("rb")
began = time.monotonic()
while time.monotonic() < began + 3:
    assert stream.readline() in (b"tick\\n", b"HTTP/1.0 200 OK\\r\\n", b"\\r\\n")
with socket.create_connection(("renewed.com", 80), timeout=30) as second:
    second.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    assert b"45.90.34.3" in second.makefile("rb").read()
assert stream.readline() == b"tick\\n"
print("went on")
"""
    done = await cell.room.python(code)
    assert done.stdout == b"went on\n", done
