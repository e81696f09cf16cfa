"""Limits of connections: unauthenticated peers share a few, and take none from authenticated ones."""

from __future__ import annotations

import pytest

from k8e.core.access.access import Payer
from k8e.doors.connection_limits import ConnectionLimits, Peer, UnauthenticatedLimit

ACME, OTHER = Payer(-1, "acme"), Payer(-1, "other")


class Port:
    """Opens connections, and notes which were closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.closed: list[str] = []

    def open(self, source: str, weight: int = 1) -> Peer:
        peer = self.try_to_open(source, weight)
        assert peer is not None
        return peer

    def try_to_open(self, source: str, weight: int = 1) -> Peer | None:
        found: list[Peer] = []

        def close() -> None:
            self.closed.append(source)
            self.limits.disconnect(found[0])

        peer = self.limits.connect(source, weight, close)
        if peer is not None:
            found.append(peer)
        return peer


def test_a_single_peer_at_an_address_is_not_evicted_by_many_at_others() -> None:
    unauthenticated, evicted = UnauthenticatedLimit(10, 8), list[str]()
    remove = unauthenticated.add("alone", lambda: evicted.append("alone"))
    for number in range(1000):
        source = f"many-{number % 3}"
        unauthenticated.add(source, lambda source=source: evicted.append(source))  # type: ignore[misc]
    assert unauthenticated.count == 10
    assert "alone" not in evicted
    remove()
    remove()
    assert unauthenticated.count == 9


async def test_the_oldest_peer_of_a_source_is_evicted() -> None:
    port = Port(ConnectionLimits(100, unauthenticated=10, each=2))
    first, second, third = (port.open("one") for _ in range(3))
    assert port.closed == ["one"]
    assert (first.descriptors, second.descriptors, third.descriptors) == (0, 1, 1), "it has ended"


async def test_authenticated_peers_have_a_limit_of_their_own() -> None:
    limits = ConnectionLimits(100, unauthenticated=2, each=2, authenticated_each=3)
    port = Port(limits)
    known = [port.open("one") for _ in range(1)]
    for _ in range(2):
        assert limits.authenticate(known[-1], ACME)
        known.append(port.open("one"))
    assert limits.authenticate(known[-1], ACME)
    assert limits.authenticate(known[-1], ACME), "once more is not one more"
    further = port.open("one")
    assert not limits.authenticate(further, ACME)
    assert limits.authenticate(further, OTHER)
    unauthenticated = [port.open("one") for _ in range(5)]
    assert len(port.closed) == 3
    limits.disconnect(known[0])
    assert limits.authenticate(unauthenticated[-1], ACME)


async def test_a_peer_whose_key_was_revoked_is_unauthenticated_again() -> None:
    limits = ConnectionLimits(100, unauthenticated=1, authenticated_each=1)
    port = Port(limits)
    peer = port.open("one")
    assert limits.authenticate(peer, ACME)
    limits.deauthenticate(peer)
    port.open("two")
    assert port.closed == ["one"]


async def test_descriptors_are_left_for_others() -> None:
    limits = ConnectionLimits(12, unauthenticated=10)
    port = Port(limits)
    for number in range(3):
        assert limits.authenticate(port.open("one", 3), Payer(number, ""))
    port.open("two", 3)
    known = port.open("three", 3)
    assert port.closed == ["two"], "an unauthenticated peer is evicted"
    assert limits.authenticate(known, ACME)
    assert port.try_to_open("four", 3) is None


async def test_one_payer_has_not_all_descriptors() -> None:
    limits = ConnectionLimits(24)
    port = Port(limits)
    peers = [port.open("one", 3) for _ in range(3)]
    assert [limits.authenticate(peer, ACME) for peer in peers] == [True, True, False]
    assert limits.authenticate(peers[2], OTHER)
    limits.disconnect(peers[0])
    assert limits.authenticate(port.open("one", 3), ACME)


async def test_a_connection_that_has_ended_takes_no_place() -> None:
    limits = ConnectionLimits(100, authenticated_each=1)
    port = Port(limits)
    ended = port.open("one")
    limits.disconnect(ended)
    assert limits.authenticate(ended, ACME)
    limits.note_request(ended)
    limits.deauthenticate(ended)
    assert (
        limits._connections,
        limits._descriptors_of,
        limits._unauthenticated.count,
    ) == ({}, {}, 0)
    assert limits.authenticate(port.open("one"), ACME)


@pytest.mark.parametrize("requested", [False, True])
async def test_an_unauthenticated_peer_has_a_deadline(requested: bool) -> None:
    import asyncio

    limits = ConnectionLimits(
        100, first_request=60.0 if requested else 0.01, authentication=0.01 if requested else 60.0
    )
    port = Port(limits)
    kept, peer = port.open("kept"), port.open("one")
    assert limits.authenticate(kept, ACME)
    if requested:
        limits.note_request(peer)
    while not port.closed:
        await asyncio.sleep(0.01)
    assert port.closed == ["one"]
