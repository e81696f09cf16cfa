"""Routes between nodes: one to each other node's pods, whatever nodes say about themselves."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from k8e.cluster.member.routes import compare_routes, want_routes

PODS = IPv4Network("10.42.0.0/16")


def node(name: str, part: str | None, address: str | None, created: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    addresses = (
        [] if address is None else [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}]
    )
    spec = {} if part is None else {"podCIDR": part}
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": spec,
        "status": {"addresses": addresses},
    }


ONE = node("one", "10.42.0.0/24", "192.168.0.1")
TWO = node("two", "10.42.1.0/24", "192.168.0.2")

networks = st.integers(0, 7).map(lambda n: IPv4Network(f"10.42.{n}.0/24"))
addresses = st.integers(1, 5).map(lambda n: IPv4Address(f"192.168.0.{n}"))
tables = st.dictionaries(networks, addresses)


def test_a_node_has_a_route_to_each_other_one() -> None:
    assert want_routes([ONE, TWO], "one", PODS) == {IPv4Network("10.42.1.0/24"): IPv4Address("192.168.0.2")}
    assert want_routes([ONE, TWO], "two", PODS) == {IPv4Network("10.42.0.0/24"): IPv4Address("192.168.0.1")}


def test_a_node_that_is_not_complete_has_none() -> None:
    incomplete = [
        node("three", None, "192.168.0.3"),
        node("four", "10.42.4.0/24", None),
        {"metadata": {"name": "five"}},
    ]
    damaged = [node("six", "many", "192.168.0.6"), node("seven", "10.42.7.0/24", "there")]
    assert want_routes([ONE, *incomplete, *damaged], "one", PODS) == {}


def test_a_node_gets_no_network_that_is_not_the_pods() -> None:
    for part in ("0.0.0.0/0", "192.168.0.0/24", "10.0.0.0/8", "10.43.0.0/24"):
        assert want_routes([ONE, node("two", part, "192.168.0.2")], "one", PODS) == {}
    assert want_routes([ONE, node("two", "10.42.1.0/24", "10.42.1.1")], "one", PODS) == {}


def test_a_node_gets_no_network_of_an_older_one() -> None:
    for part in ("10.42.1.0/24", "10.42.0.0/16", "10.42.0.0/24"):
        thief = node("a-thief", part, "192.168.0.9", "2026-02-01T00:00:00Z")
        found = want_routes([thief, ONE, TWO], "one", PODS)
        assert found == {IPv4Network("10.42.1.0/24"): IPv4Address("192.168.0.2")}


@given(tables, tables)
def test_what_is_set_and_removed_leads_from_what_is_there_to_what_is_wanted(
    wanted: dict[IPv4Network, IPv4Address], there: dict[IPv4Network, IPv4Address]
) -> None:
    setting, removing = compare_routes(wanted, there)
    after = {part: address for part, address in there.items() if part not in removing}
    after.update({route.pods: route.node for route in setting})
    assert after == wanted
    assert len(setting) + len(removing) <= len(wanted) + len(there)
    assert compare_routes(wanted, wanted) == ([], [])
