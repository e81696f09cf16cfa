"""Turns: where callers wait for the same few places, each payer has a queue, and the queues take turns.

A payer who asks a thousand times waits behind themselves and delays no other payer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from k8e.core.access.access import Payer
from k8e.delays import Delays


class Turns:
    def __init__(self, places: int, each: int | None = None) -> None:
        """`each`: how many places one payer can have at most, even if there are others."""
        self._free = places
        self._each = each or places
        self._held: collections.Counter[Payer] = collections.Counter()
        # In the order in which the queues come next.
        self._queues: dict[Payer, collections.deque[asyncio.Future[None]]] = {}
        self._brief: dict[float, Delays] = {}  # by the seconds for which a place is given

    @asynccontextmanager
    async def take(self, payer: Payer) -> AsyncIterator[None]:
        await self.acquire(payer)
        try:
            yield
        finally:
            self.release(payer)

    async def take_briefly(self, payer: Payer, seconds: float, due: float) -> AbstractContextManager[None]:
        """Gives the place back after `seconds`, also when the work goes on. At `due`, in the loop's time, the caller
        goes on without a place."""
        if not self._take_free(payer):
            try:
                async with asyncio.timeout_at(due):
                    await self.acquire(payer)
            except TimeoutError:
                return contextlib.nullcontext()
        delays = self._brief.get(seconds)
        if delays is None:
            delays = self._brief[seconds] = Delays(seconds)
        return _BriefPlace(self, payer, delays)

    async def acquire(self, payer: Payer) -> None:
        """The place is taken until `release`."""
        if self._take_free(payer):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(payer, collections.deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(payer)  # it was our turn, and we are gone
            else:
                self._forget(payer, turn)
            raise

    def _take_free(self, payer: Payer) -> bool:
        # Waiters who could go have gone already, so a free place is free.
        if not self._free or self._held[payer] >= self._each:
            return False
        self._grant(payer)
        return True

    def is_wanted(self, payer: Payer) -> bool:
        """Whether another payer waits who could have a place that this one gives back."""
        return any(one != payer and self._held[one] < self._each for one in self._queues)

    def _grant(self, payer: Payer) -> None:
        self._free -= 1
        self._held[payer] += 1

    def release(self, payer: Payer) -> None:
        self._free += 1
        self._held[payer] -= 1
        if not self._held[payer]:
            del self._held[payer]
        self._call_next()

    def _call_next(self) -> None:
        while self._free:
            payer = next((one for one in self._queues if self._held[one] < self._each), None)
            if payer is None:
                return
            queue = self._queues.pop(payer)
            turn = queue.popleft()
            if queue:
                self._queues[payer] = queue  # behind the others now
            if not turn.done():
                self._grant(payer)
                turn.set_result(None)

    def _forget(self, payer: Payer, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(payer)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[payer]


class _BriefPlace(AbstractContextManager[None]):
    """Given back at the end of the block, or by its timer before."""

    __slots__ = ("_delays", "_number", "_payer", "_turns")

    def __init__(self, turns: Turns, payer: Payer, delays: Delays) -> None:
        self._turns: Turns | None = turns  # None: the place is given back
        self._payer = payer
        self._delays = delays
        self._number = delays.add(self._give_back)

    def _give_back(self) -> None:
        if self._turns is not None:
            self._turns.release(self._payer)
            self._turns = None

    def __exit__(self, *_: object) -> None:
        self._delays.remove(self._number)
        self._give_back()
