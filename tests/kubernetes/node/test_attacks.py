"""Attacks on a list of hosts from inside pods, on runc and gVisor: the attempts of one machine's tests where they are
the same, and the ones that differ because a pod has no IPv6 and no root."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from k8e.cluster.cluster import Cluster
from k8e.engine import Runtime
from k8e.engine.kubernetes.options import NODE
from tests.egress import test_refused as refused
from tests.egress.internet import HOST4, NAME_SERVER
from tests.egress.rig import Attempt, Cell
from tests.egress.test_refused import METADATA, METADATA_PLACES, REBINDING, SHUT, UNKNOWN, ZONE, expect_refused
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.rig import Site, open_engine
from tests.kubernetes.node.cells import NodeInternet, PodSite, internet_of_node
from tests.kubernetes.node.rig import Helper

NO_WAY = (SHUT, "!ENETUNREACH", "!EADDRNOTAVAIL", "!EAFNOSUPPORT", "!EHOSTUNREACH")
NO_SOCKET = (*NO_WAY, "!EACCES", "!EPERM", "!EPROTONOSUPPORT", "!ESOCKTNOSUPPORT", "!EINVAL")


@pytest.fixture(scope="module")
def kubernetes_site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        yield replace(site, options=replace(site.options, egress=NODE))


@pytest.fixture(scope="module")
def internet(cluster: Cluster) -> Iterator[NodeInternet]:
    with internet_of_node(cluster) as internet:
        internet.publish(ZONE)
        yield internet


@pytest.fixture(scope="module")
def helper(kubernetes_site: Site, internet: NodeInternet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    kubernetes_site.engine()  # has made its key
    helper = Helper(kubernetes_site, tmp_path_factory.mktemp("helper"))
    helper.start()
    try:
        yield helper
        kubernetes_site.kubectl("wait", "--for=delete", "pod", "--all", "--timeout=90s")
    finally:
        helper.end()


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: str(runtime.value))
async def site(
    request: pytest.FixtureRequest, kubernetes_site: Site, helper: Helper, internet: NodeInternet
) -> AsyncIterator[PodSite]:
    async with open_engine(kubernetes_site, claims=False) as engine:
        yield PodSite(internet, engine, request.param)


@pytest.fixture(scope="module")
async def cell(site: PodSite) -> AsyncIterator[Cell]:
    async with site.cell("allowed.com", "*.evil.internal", *REBINDING) as cell:
        yield cell


async def test_what_is_listed_is_reached(cell: Cell) -> None:
    """The control of all others."""
    assert await cell.reached(("tcp", "allowed.com", 80)) == ["45.90.31.1"]


async def test_names_that_only_look_like_a_listed_one(cell: Cell) -> None:
    await refused.test_names_that_only_look_like_a_listed_one(cell)


async def test_names_that_are_none(cell: Cell) -> None:
    await refused.test_names_that_are_none(cell)


async def test_questions_to_another_resolver(cell: Cell) -> None:
    await refused.test_questions_to_another_resolver(cell, {})


async def test_tunnels_below_a_name_that_is_not_listed(cell: Cell) -> None:
    await refused.test_tunnels_below_a_name_that_is_not_listed(cell)


@pytest.mark.parametrize("name", [name for name in REBINDING if name != "hidden.net"])
async def test_a_listed_name_with_an_answer_that_no_list_opens(cell: Cell, name: str) -> None:
    await refused.test_a_listed_name_with_an_answer_that_no_list_opens(cell, name)


async def test_addresses_in_every_spelling(cell: Cell) -> None:
    await expect_refused(
        cell,
        {
            ("tcp", "45.90.66.6", 80): SHUT,
            ("numeric", "760889862", 80): SHUT,
            ("numeric", "0x2d5a4206", 443): SHUT,
            ("numeric", "055.0132.0102.06", 80): SHUT,
            ("numeric", "45.90.16902", 80): SHUT,
            ("tcp", "45.90.31.1", 8080): SHUT,
        },
    )


async def test_metadata(cell: Cell) -> None:
    await cell.refusals()
    places = [address for address in METADATA_PLACES if ":" not in address]
    attempts: dict[Attempt, str] = {("tcp", address, port): SHUT for address in places for port in (80, 443)}
    for name in ("metadata.google.internal", "METADATA.google.internal.", "metadata", "instance-data.ec2.internal"):
        attempts[("tcp", name, 80)] = UNKNOWN
    await expect_refused(cell, attempts)
    reasons = {each.host or each.address: each.reason for each in await cell.refusals()}
    assert (reasons["metadata.google.internal"], reasons[METADATA]) == ("metadata", "metadata")


async def test_ipv6_leads_nowhere(cell: Cell) -> None:
    cell.site.internet.clear()
    attempts: list[Attempt] = [("tcp", address, 80) for address in ("2a0b:4340:31::1", "64:ff9b::2d5a:4206", "fe80::1")]
    attempts += [("mapped", "::ffff:45.90.66.6", 80), ("tcp", "fd00:ec2::254", 80)]
    for attempt, result in zip(attempts, await cell.attempt(*attempts), strict=True):
        assert result in (*NO_WAY, "!EINVAL"), (attempt, result)
    assert cell.site.internet.notes().packets == []


async def test_only_tcp(cell: Cell) -> None:
    await cell.refusals()
    assert await cell.attempt(("udp", "45.90.31.1", 443)) == [SHUT]
    cell.site.internet.clear()
    places = [(address, port) for address in ("45.90.31.1", "45.90.31.2", NAME_SERVER) for port in (443, 123, 9999)]
    await cell.attempt(*(("datagram", *place) for place in places))
    told = await cell.refused_addresses()
    assert {told[place] for place in places} == {"protocol_not_allowed"}
    by_hand: list[Attempt] = [("ping", "45.90.31.1")]
    by_hand += [("raw", "45.90.31.1", protocol) for protocol in (1, 6, 17, 47, 132, 255)]
    by_hand += [
        ("socket", "AF_PACKET", "SOCK_RAW", 0x0300), ("socket", "AF_PACKET", "SOCK_DGRAM", 0x0300),
        ("socket", "AF_INET", "SOCK_STREAM", 132), ("socket", "AF_VSOCK", "SOCK_STREAM", 0),
        ("socket", "AF_BLUETOOTH", "SOCK_RAW", 1), ("socket", "AF_CAN", "SOCK_RAW", 1),
    ]  # fmt: skip
    for attempt, result in zip(by_hand, await cell.attempt(*by_hand), strict=True):
        assert result in NO_SOCKET or (attempt[0], result) == ("ping", "!SILENCE"), (attempt, result)
    assert cell.site.internet.notes().packets == []


async def test_addresses_that_are_not_its_own(site: PodSite, cell: Cell) -> None:
    """Of a neighbour, of the node, and one of nowhere. Of packets that leave all the same none gets through."""
    async with site.cell("allowed.com") as other:
        neighbour = await site.engine.find_address(other.room.name)
        node = HOST4
        site.internet.clear()
        attempts: list[Attempt] = [("from", source, "45.90.31.1", 80) for source in (neighbour, node, "45.90.77.7")]
        attempts += [("configure", "eth0", neighbour), ("netlink", neighbour)]
        for attempt, result in zip(attempts, await cell.attempt(*attempts), strict=True):
            assert result in ("!SILENCE", "!ETIMEDOUT", *NO_SOCKET, "!EOPNOTSUPP", "!ENOTTY"), (attempt, result)
        assert site.internet.notes().connections == []
        assert await other.reached(("tcp", "allowed.com", 80)) == ["45.90.31.1"]


async def test_the_list_of_one_is_not_that_of_another(site: PodSite, cell: Cell) -> None:
    async with site.cell("other.com") as other:
        assert await other.reached(("tcp", "other.com", 80)) == ["45.90.31.2"]
        await expect_refused(cell, {("tcp", "45.90.31.2", 80): SHUT, ("lookup", "other.com"): UNKNOWN})
        await expect_refused(other, {("tcp", "45.90.31.1", 80): SHUT, ("lookup", "allowed.com"): UNKNOWN})
