"""Limits the connections to the ports that other machines can reach: those of the gateway and of MCP over HTTP.

A peer is unauthenticated until its first request with a valid certificate or key. Unauthenticated peers share a small
number of connections, each for a short time, and take none from authenticated ones. A new peer always finds room: it
replaces the oldest unauthenticated peer of the source that has most of them, so that many peers at one address do not
push out a single one at another. All connections together use at most a quarter of the daemon's descriptors; the rest
serves users of this machine and sandboxes.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from k8e.core.access.access import Payer

UNAUTHENTICATED: Final = 512  # connections
UNAUTHENTICATED_EACH: Final = 256  # of one source
AUTHENTICATED_EACH: Final = 1000  # of one payer, who has at most a quarter of all connections' descriptors as well
FIRST_REQUEST: Final = 10.0  # seconds from a connection to its first request
AUTHENTICATION: Final = 60.0  # seconds from there to the first authenticated request
_SHARE: Final = 4


class UnauthenticatedLimit:
    """Counts unauthenticated connections or calls by source, and evicts one when there are too many. Pure."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._sources: dict[str, dict[object, Callable[[], None]]] = {}  # of each source, oldest first
        self.count = 0

    def add(self, source: str, evict: Callable[[], None]) -> Callable[[], None]:
        """`evict` is called when a newer one needs the room. Returns what removes this one, evicted or not."""
        if len(self._sources.get(source, ())) >= self._each:
            self._evict(source)
        elif self.count >= self._most:
            self.evict_one()
        key = object()
        self._sources.setdefault(source, {})[key] = evict
        self.count += 1
        return functools.partial(self._remove, source, key)

    def evict_one(self) -> None:
        self._evict(max(self._sources, key=lambda source: len(self._sources[source])))

    def _evict(self, source: str) -> None:
        key, evict = next(iter(self._sources[source].items()))
        self._remove(source, key)
        evict()

    def _remove(self, source: str, key: object) -> None:
        same_source = self._sources.get(source, {})
        if same_source.pop(key, None) is not None:
            self.count -= 1
            if not same_source:
                del self._sources[source]


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of one connection."""

    source: str
    descriptors: int  # that the connection uses; 0 once it has ended
    close: Callable[[], None] = field(repr=False)
    remove_unauthenticated: Callable[[], None] | None = field(default=None, repr=False)
    payer: Payer | None = None  # of an authenticated peer
    has_requested: bool = False
    deadline: asyncio.TimerHandle | None = None


class ConnectionLimits:
    def __init__(
        self,
        descriptors: int | None = None,
        *,
        unauthenticated: int = UNAUTHENTICATED,
        each: int = UNAUTHENTICATED_EACH,
        authenticated_each: int = AUTHENTICATED_EACH,
        shares: int = _SHARE,
        first_request: float = FIRST_REQUEST,
        authentication: float = AUTHENTICATION,
    ) -> None:
        if descriptors is None:
            descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        self._descriptors = descriptors
        self._unauthenticated = UnauthenticatedLimit(unauthenticated, each)
        self._authenticated_each = authenticated_each
        self._first_request = first_request
        self._authentication = authentication
        self._share = descriptors // shares
        self._connections: collections.Counter[Payer] = collections.Counter()
        self._descriptors_of: collections.Counter[Payer] = collections.Counter()
        self._used = 0

    def connect(self, source: str, descriptors: int, close: Callable[[], None]) -> Peer | None:
        """Counts a new connection. None: there is no room, and no unauthenticated peer to evict."""
        while self._used + descriptors > self._descriptors and self._unauthenticated.count:
            self._unauthenticated.evict_one()
        if self._used + descriptors > self._descriptors:
            return None
        peer = Peer(source, descriptors, close)
        self._used += descriptors
        self._add_unauthenticated(peer, self._first_request)
        return peer

    def note_request(self, peer: Peer) -> None:
        """A request has come. Only the first one extends the deadline of an unauthenticated peer."""
        if peer.remove_unauthenticated is not None and not peer.has_requested:
            self._set_deadline(peer, self._authentication)
        peer.has_requested = True

    def authenticate(self, peer: Peer, payer: Payer) -> bool:
        """False: the payer has too many connections, and the peer stays unauthenticated."""
        if peer.payer == payer or not peer.descriptors:  # the connection may have ended during authentication
            return True
        used = self._descriptors_of[payer] + peer.descriptors
        if self._connections[payer] >= self._authenticated_each or used > self._share:
            return False
        self.deauthenticate(peer)
        self._remove_unauthenticated(peer)
        peer.payer = payer
        self._connections[payer] += 1
        self._descriptors_of[payer] += peer.descriptors
        return True

    def deauthenticate(self, peer: Peer) -> None:
        """The peer's certificate or key is not valid any more."""
        if peer.payer is not None:
            self._remove_authenticated(peer)
            self._add_unauthenticated(peer, self._authentication)

    def disconnect(self, peer: Peer) -> None:
        if peer.descriptors:
            self._used -= peer.descriptors
            self._remove_unauthenticated(peer)
            self._remove_authenticated(peer)
            peer.descriptors = 0

    def _add_unauthenticated(self, peer: Peer, seconds: float) -> None:
        peer.remove_unauthenticated = self._unauthenticated.add(peer.source, peer.close)
        self._set_deadline(peer, seconds)

    def _remove_unauthenticated(self, peer: Peer) -> None:
        if peer.deadline is not None:
            peer.deadline.cancel()
            peer.deadline = None
        if peer.remove_unauthenticated is not None:
            peer.remove_unauthenticated()
            peer.remove_unauthenticated = None

    def _remove_authenticated(self, peer: Peer) -> None:
        if peer.payer is not None:
            self._connections[peer.payer] -= 1
            self._descriptors_of[peer.payer] -= peer.descriptors
            if not self._connections[peer.payer]:
                del self._connections[peer.payer], self._descriptors_of[peer.payer]
            peer.payer = None

    def _set_deadline(self, peer: Peer, seconds: float) -> None:
        if peer.deadline is not None:
            peer.deadline.cancel()
        peer.deadline = asyncio.get_running_loop().call_later(seconds, peer.close)
