"""Places for connections: strangers have a few among them, those who are known have theirs."""

from __future__ import annotations

import pytest

from k8e.core.access.access import Payer
from k8e.doors.crowd import Crowd, Place, Strangers

ACME, OTHER = Payer(-1, "acme"), Payer(-1, "other")


class Port:
    """Opens connections, and notes which were closed."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.closed: list[str] = []

    def open(self, source: str, weight: int = 1) -> Place:
        place = self.try_to_open(source, weight)
        assert place is not None
        return place

    def try_to_open(self, source: str, weight: int = 1) -> Place | None:
        found: list[Place] = []

        def close() -> None:
            self.closed.append(source)
            self.crowd.leave(found[0])

        place = self.crowd.enter(source, weight, close)
        if place is not None:
            found.append(place)
        return place


def test_who_is_alone_at_an_address_is_not_pushed_out_by_a_crowd_at_others() -> None:
    strangers, evicted = Strangers(10, 8), list[str]()
    alone = strangers.enter("alone", lambda: evicted.append("alone"))
    for number in range(1000):
        source = f"crowd-{number % 3}"
        strangers.enter(source, lambda source=source: evicted.append(source))  # type: ignore[misc]
    assert strangers.count == 10
    assert "alone" not in evicted
    strangers.leave(alone)
    strangers.leave(alone)
    assert strangers.count == 9


async def test_of_one_source_the_oldest_goes() -> None:
    port = Port(Crowd(100, strangers=10, each=2))
    first, second, third = (port.open("one") for _ in range(3))
    assert port.closed == ["one"]
    assert (first.weight, second.weight, third.weight) == (0, 1, 1), "it is gone"


async def test_known_ones_take_no_place_of_strangers_and_have_a_number_of_their_own() -> None:
    crowd = Crowd(100, strangers=2, each=2, known_each=3)
    port = Port(crowd)
    known = [port.open("one") for _ in range(1)]
    for _ in range(2):
        assert crowd.admit(known[-1], ACME)
        known.append(port.open("one"))
    assert crowd.admit(known[-1], ACME)
    assert crowd.admit(known[-1], ACME), "once more is not one more"
    further = port.open("one")
    assert not crowd.admit(further, ACME)
    assert crowd.admit(further, OTHER)
    strangers = [port.open("one") for _ in range(5)]
    assert len(port.closed) == 3
    crowd.leave(known[0])
    assert crowd.admit(strangers[-1], ACME)


async def test_who_is_not_known_any_more_is_a_stranger_again() -> None:
    crowd = Crowd(100, strangers=1, known_each=1)
    port = Port(crowd)
    place = port.open("one")
    assert crowd.admit(place, ACME)
    crowd.distrust(place)
    port.open("two")
    assert port.closed == ["one"]


async def test_descriptors_are_left_for_others() -> None:
    crowd = Crowd(12, strangers=10)
    port = Port(crowd)
    for number in range(3):
        assert crowd.admit(port.open("one", 3), Payer(number, ""))
    port.open("two", 3)
    known = port.open("three", 3)
    assert port.closed == ["two"], "a stranger makes room"
    assert crowd.admit(known, ACME)
    assert port.try_to_open("four", 3) is None


async def test_one_payer_has_not_all_descriptors() -> None:
    crowd = Crowd(24)
    port = Port(crowd)
    places = [port.open("one", 3) for _ in range(3)]
    assert [crowd.admit(place, ACME) for place in places] == [True, True, False]
    assert crowd.admit(places[2], OTHER)
    crowd.leave(places[0])
    assert crowd.admit(port.open("one", 3), ACME)


async def test_a_connection_that_has_ended_takes_no_place() -> None:
    crowd = Crowd(100, known_each=1)
    port = Port(crowd)
    ended = port.open("one")
    crowd.leave(ended)
    assert crowd.admit(ended, ACME)
    crowd.greet(ended)
    crowd.distrust(ended)
    assert (crowd._known, crowd._weights, crowd._strangers.count) == ({}, {}, 0)
    assert crowd.admit(port.open("one"), ACME)


@pytest.mark.parametrize("greeted", [False, True])
async def test_a_stranger_has_a_moment(greeted: bool) -> None:
    import asyncio

    crowd = Crowd(100, greeting=60.0 if greeted else 0.01, stay=0.01 if greeted else 60.0)
    port = Port(crowd)
    kept, place = port.open("kept"), port.open("one")
    assert crowd.admit(kept, ACME)
    if greeted:
        crowd.greet(place)
    while not port.closed:
        await asyncio.sleep(0.01)
    assert port.closed == ["one"]
