"""Who is connected to the ports that other machines can reach: the gateway's, and those of MCP over HTTP.

A connection is a stranger's until its first request of a known caller. Strangers together have few places, not for
long, and none of those that are known. A newcomer always finds one: in the place of the oldest stranger of the source
that has most of them, so that who is alone at an address is not pushed out by a crowd at another. All together never
have more than a quarter of the daemon's descriptors; the rest is for people of this machine and for sandboxes.
"""

from __future__ import annotations

import asyncio
import collections
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from k8e.core.access.access import Payer

STRANGERS: Final = 512
STRANGERS_EACH: Final = 256  # of one source
KNOWN_EACH: Final = 1000  # of one payer, who also has no more than a quarter of the descriptors that there are for all
GREETING: Final = 10.0  # seconds from a connection to its first request
STAY: Final = 60.0  # and then to the first of a known caller
_SHARE: Final = 4


class Strangers:
    """Places for strangers. Pure."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._sources: dict[str, dict[Stranger, None]] = {}  # of each source, oldest first
        self.count = 0

    def enter(self, source: str, evict: Callable[[], None]) -> Stranger:
        """`evict` is called when the place is needed for others."""
        if len(self._sources.get(source, ())) >= self._each:
            self._evict(self._sources[source])
        elif self.count >= self._most:
            self.evict_one()
        stranger = Stranger(source, evict)
        self._sources.setdefault(source, {})[stranger] = None
        self.count += 1
        return stranger

    def leave(self, stranger: Stranger) -> None:
        """Also for one that was evicted."""
        places = self._sources.get(stranger.source, {})
        if stranger in places:
            del places[stranger]
            self.count -= 1
            if not places:
                del self._sources[stranger.source]

    def evict_one(self) -> None:
        self._evict(max(self._sources.values(), key=len))

    def _evict(self, places: dict[Stranger, None]) -> None:
        oldest = next(iter(places))
        self.leave(oldest)
        oldest.evict()


@dataclass(eq=False, slots=True)
class Stranger:
    source: str
    evict: Callable[[], None] = field(repr=False)


@dataclass(eq=False, slots=True)
class Place:
    """One connection's."""

    source: str
    weight: int
    close: Callable[[], None] = field(repr=False)
    stranger: Stranger | None = None
    payer: Payer | None = None
    greeted: bool = False
    deadline: asyncio.TimerHandle | None = None


class Crowd:
    def __init__(
        self,
        descriptors: int | None = None,
        *,
        strangers: int = STRANGERS,
        each: int = STRANGERS_EACH,
        known_each: int = KNOWN_EACH,
        shares: int = _SHARE,
        greeting: float = GREETING,
        stay: float = STAY,
    ) -> None:
        if descriptors is None:
            descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        self._descriptors = descriptors
        self._strangers = Strangers(strangers, each)
        self._known_each = known_each
        self._greeting = greeting
        self._stay = stay
        self._share = descriptors // shares
        self._known: collections.Counter[Payer] = collections.Counter()  # connections
        self._weights: collections.Counter[Payer] = collections.Counter()  # and their descriptors
        self._used = 0

    def enter(self, source: str, weight: int, close: Callable[[], None]) -> Place | None:
        """A new connection, which needs that many descriptors. None: there is no room, and no stranger to make any."""
        while self._used + weight > self._descriptors and self._strangers.count:
            self._strangers.evict_one()
        if self._used + weight > self._descriptors:
            return None
        place = Place(source, weight, close)
        self._used += weight
        self._estrange(place, self._greeting)
        return place

    def greet(self, place: Place) -> None:
        """A request has come, of a known caller or not. Only the first gives a stranger some more time."""
        if place.stranger is not None and not place.greeted:
            self._set_deadline(place, self._stay)
        place.greeted = True

    def admit(self, place: Place, payer: Payer) -> bool:
        """Its request is of a known caller. False: the caller has too many connections; it stays a stranger's."""
        if place.payer == payer or not place.weight:  # the connection may have ended while its caller was looked for
            return True
        if self._known[payer] >= self._known_each or self._weights[payer] + place.weight > self._share:
            return False
        self.distrust(place)
        self._welcome(place)
        place.payer = payer
        self._known[payer] += 1
        self._weights[payer] += place.weight
        return True

    def distrust(self, place: Place) -> None:
        """Who was known is not any more."""
        if place.payer is not None:
            self._forget(place)
            self._estrange(place, self._stay)

    def leave(self, place: Place) -> None:
        if place.weight:
            self._used -= place.weight
            self._welcome(place)
            self._forget(place)
            place.weight = 0

    def _estrange(self, place: Place, seconds: float) -> None:
        place.stranger = self._strangers.enter(place.source, place.close)
        self._set_deadline(place, seconds)

    def _welcome(self, place: Place) -> None:
        if place.deadline is not None:
            place.deadline.cancel()
            place.deadline = None
        if place.stranger is not None:
            self._strangers.leave(place.stranger)
            place.stranger = None

    def _forget(self, place: Place) -> None:
        if place.payer is not None:
            self._known[place.payer] -= 1
            self._weights[place.payer] -= place.weight
            if not self._known[place.payer]:
                del self._known[place.payer], self._weights[place.payer]
            place.payer = None

    def _set_deadline(self, place: Place, seconds: float) -> None:
        if place.deadline is not None:
            place.deadline.cancel()
        place.deadline = asyncio.get_running_loop().call_later(seconds, place.close)
