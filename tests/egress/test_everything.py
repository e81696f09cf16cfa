"""`*`: every name and every public address on every TCP port, and nothing of the machine or its neighbourhood."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.egress.internet import HOST4, HOST6, NAME_SERVER
from tests.egress.rig import Attempt, Cell, Site
from tests.egress.test_changes import CUT, watching
from tests.egress.zones import Zone

pytestmark = pytest.mark.anyio

MIRROR = "mirror.corp.com"
ZONE: Zone = {
    "any.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]},
    "other.org": {"A": ["45.90.31.2"]},
    "rebound.com": {"A": ["10.66.0.1", "169.254.169.254", "127.0.0.1"], "AAAA": ["fd00::1"]},
    "half.com": {"A": ["10.66.0.1", "45.90.31.3"]},
    MIRROR: {"A": ["10.66.0.80"]},
}
SHUT = "!ECONNREFUSED"


@pytest.fixture(scope="module", autouse=True)
def configured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", f"https://{MIRROR}/simple/")
        yield


@pytest.fixture(scope="module")
async def cell(site: Site) -> AsyncIterator[Cell]:
    async with site.cell("*") as cell:
        yield cell


async def test_names_and_addresses_on_any_port(cell: Cell) -> None:
    attempts: list[Attempt] = [("tcp", "any.com", port) for port in (22, 80, 8080, 8443)]
    attempts += [("tcp", "other.org", 80), ("tcp", "45.90.77.7", 3128), ("tcp", "2a0b:4340:77::7", 7000)]
    reached = await cell.reached(*attempts)
    assert reached[4:] == ["45.90.31.2", "45.90.77.7", "2a0b:4340:77::7"]
    assert set(reached[:4]) <= {"45.90.31.1", "2a0b:4340:31::1"}
    assert await cell.reached(("every", "any.com", 80)) == [["2a0b:4340:31::1", "45.90.31.1"]]
    assert await cell.refusals() == []


async def test_what_no_list_opens_and_what_is_private_stays_shut(cell: Cell) -> None:
    await cell.refusals()
    cell.site.internet.clear()
    expected = {
        ("169.254.169.254", 80): "metadata",
        ("100.100.100.200", 80): "metadata",
        ("168.63.129.16", 80): "metadata",
        ("169.254.7.7", 80): "address_forbidden",
        ("10.66.0.1", 80): "address_not_listed",
        ("192.168.1.1", 443): "address_not_listed",
        ("172.16.0.1", 22): "address_not_listed",
        ("100.64.0.1", 80): "address_not_listed",
        ("198.18.0.1", 80): "address_not_listed",
        ("fd00::1", 80): "address_not_listed",
        ("fd00:ec2::254", 80): "metadata",
        ("2001:db8::1", 80): "address_not_listed",
        ("64:ff9b::a9fe:a9fe", 80): "metadata",
        ("64:ff9b::a00:1", 80): "address_not_listed",
        (HOST4, 80): "machine",
        (HOST6, 80): "machine",
    }
    results = await cell.attempt(*(("tcp", *target) for target in expected))
    assert set(results) == {SHUT}, dict(zip(expected, results, strict=True))
    assert await cell.refused_addresses() == expected
    assert cell.site.internet.notes().packets == []


async def test_a_name_does_not_lead_to_what_is_private(cell: Cell) -> None:
    await cell.refusals()
    got = await cell.attempt(("lookup", "rebound.com"), ("lookup", "half.com"), ("lookup", "metadata.google.internal"))
    assert got[0].startswith("!EAI_")
    assert got[1] == ["45.90.31.3"]
    assert got[2].startswith("!EAI_")
    assert await cell.refused_names() == {
        "rebound.com": "address_not_public",
        "metadata.google.internal": "metadata",
    }


async def test_the_machines_registry_may_be_private(cell: Cell) -> None:
    assert await cell.attempt(("tcp", "10.66.0.80", 80)) == [SHUT]
    assert await cell.reached(("tcp", MIRROR, 80), ("tcp", MIRROR, 8080)) == ["10.66.0.80", SHUT]


async def test_only_tcp(cell: Cell) -> None:
    await cell.refusals()
    cell.site.internet.clear()
    assert await cell.attempt(("udp", "45.90.31.1", 443), ("udp", "2a0b:4340:31::1", 443)) == [SHUT, SHUT]
    await cell.attempt(("datagram", NAME_SERVER, 9999), ("ping", "45.90.31.1"))
    assert cell.site.internet.notes().packets == []
    assert set((await cell.refused_addresses()).values()) == {"protocol_not_allowed"}


async def test_another_sandbox_is_as_far_as_ever(site: Site, cell: Cell) -> None:
    async with site.cell("*") as other:
        address = str(site.engine._network._attachment(other.room.name).wire.pairs[0][1].ip)
        await cell.refusals()
        assert await cell.attempt(("tcp", address, 80)) == [SHUT]
        assert await cell.refused_addresses() == {(address, 80): "other_sandbox"}


async def test_changes_to_and_from_everything(site: Site) -> None:
    """Connections of entries that stay go on; those that only `*` allowed are cut with it."""
    async with site.cell("any.com", "10.66.1.0/24") as cell:
        async with watching(cell, "any.com") as named, watching(cell, "10.66.1.1") as private:
            assert await named.lines("tick")
            assert await private.lines("tick")
            await cell.set_hosts("*")
            assert await private.lines(*CUT) in CUT
            for _ in range(10):
                assert await named.line() == "tick"
            async with watching(cell, "45.90.31.2", 8080) as typed:
                assert await typed.lines("tick")
                await cell.set_hosts("*", "other.org:8080")
                for _ in range(10):
                    assert await typed.line() == "tick"
                await cell.set_hosts("any.com")
                assert await typed.lines(*CUT) in CUT
            for _ in range(10):
                assert await named.line() == "tick"
        assert await cell.attempt(("tcp", "45.90.31.2", 80), ("tcp", "other.org", 80)) == [SHUT, "!EAI_NONAME"]
        assert (await cell.reached(("tcp", "any.com", 80)))[0] in ("45.90.31.1", "2a0b:4340:31::1")


async def test_a_new_daemon_goes_on_with_it(site: Site, cell: Cell) -> None:
    await site.engine.close()
    site.engine = site.make_engine()
    again = await site.enter(cell.room.name)
    assert await again.reached(("tcp", "45.90.31.3", 8080)) == ["45.90.31.3"]
    async with watching(again, "45.90.31.2") as gone:
        assert await gone.lines("tick")
        await again.set_hosts("any.com")
        assert await gone.lines(*CUT) in CUT
    assert await again.attempt(("tcp", "45.90.31.3", 8080)) == [SHUT]
    await again.set_hosts("*")
    assert await again.reached(("tcp", "45.90.31.3", 8080)) == ["45.90.31.3"]
