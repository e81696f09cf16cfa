"""How much of the resolver a sandbox may use: queries per second, and queries and connections at once.

The excess is not read from the socket, so it costs the daemon nothing: it waits in a small buffer of the kernel that
belongs to that sandbox alone, or is dropped there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

RATE = 300.0  # queries per second, sustained, while other sandboxes are quiet
LEAST_RATE = 20.0  # and while many ask
ALL_RATE = 1500.0  # shared out among those that ask: each takes the daemon a quarter of a millisecond
BURST = 600.0
MAX_AT_ONCE = 64  # queries of one sandbox while others are quiet
LEAST_AT_ONCE = 4  # and while many ask
ALL_AT_ONCE = 256  # shared out among those that ask
MAX_CONNECTIONS = 8
# Queries that go on to the machine's name servers: of one sandbox, per second and at once after a quiet moment, and
# per second of all that ask. Each costs the loop more than one that is answered here, a socket, and for half a minute
# an entry in the machine's table of connections.
UPSTREAM, UPSTREAM_AT_ONCE = 50.0, 200.0
ALL_UPSTREAM = 400.0


@dataclass(slots=True)
class Load:
    """How many sandboxes have queries under way."""

    busy: int = 0

    @property
    def rate(self) -> float:
        return max(LEAST_RATE, min(RATE, ALL_RATE / max(1, self.busy)))

    @property
    def share(self) -> int:
        return max(LEAST_AT_ONCE, min(MAX_AT_ONCE, ALL_AT_ONCE // max(1, self.busy)))


class Throttle:
    """So many turns per second, in the order in which they were asked for; fewer when the load is high."""

    def __init__(self, rate: float, at_once: float, load: Load | None = None) -> None:
        self._rate = rate
        self._at_once = at_once
        self._load = load
        self._turns = at_once  # below zero: so many wait
        self._since = 0.0

    @property
    def rate(self) -> float:
        return self._rate if self._load is None else min(self._rate, ALL_UPSTREAM / max(1, self._load.busy))

    async def take(self) -> None:
        now, rate = asyncio.get_running_loop().time(), self.rate
        self._turns = min(self._at_once, self._turns + (now - self._since) * rate) - 1
        self._since = now
        if self._turns < 0:
            await asyncio.sleep(-self._turns / rate)


class Allowance:
    """Of one sandbox. The caller passes the time, so that this can be tested without waiting."""

    def __init__(self, load: Load, now: float) -> None:
        self._load = load
        self._tokens = BURST
        self._since = now
        self._at_once = 0
        self.connections = 0

    def may_connect(self, now: float) -> bool:
        return self.connections < MAX_CONNECTIONS and self._can_pay(now)

    def may_ask(self, now: float) -> bool:
        return self._at_once < self._load.share and self._can_pay(now)

    def _can_pay(self, now: float) -> bool:
        self._tokens = min(BURST, self._tokens + (now - self._since) * self._load.rate)
        self._since = now
        return self._tokens >= 1

    def connect(self) -> None:
        self._tokens -= 1
        self.connections += 1

    def disconnect(self) -> None:
        self.connections -= 1

    def begin(self) -> None:
        self._tokens -= 1
        self._load.busy += self._at_once == 0
        self._at_once += 1

    def end(self) -> None:
        self._at_once -= 1
        self._load.busy -= self._at_once == 0
