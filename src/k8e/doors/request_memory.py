"""Limits the bytes of requests in memory, of each payer and of all, at every door: from their arrival to their answer.

When there is no room for more bytes, a connection is not read for a moment, and its request is refused when that does
not help. A small amount always fits, so that callers who fill the memory keep no other from running a command. A
long-lived connection that holds little is not read for as long as it takes: other requests of its payer do not end it.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Final

from k8e.core.access.access import Payer
from k8e.core.errors import Fault, Kind

EACH: Final = 512 << 20  # of one payer; [quotas] request_bytes says otherwise
SHARES: Final = 4  # times that is the limit for all payers together
ALWAYS: Final = 4 << 20  # of one payer, whatever others hold
LONG_LIVED: Final = 2 << 20  # of a long-lived connection: a frame of input that is not whole, and a piece
PATIENCE: Final = 5.0
WAITING: Final = 16  # requests of one payer that wait for room; each has some bytes in a buffer


class RequestMemory:
    def __init__(self, each: int = EACH, most: int | None = None, *, patience: float = PATIENCE) -> None:
        self.each = each
        self.most = most or each * SHARES
        self._patience = patience
        self._held: collections.Counter[Payer] = collections.Counter()
        self._waiting: collections.Counter[Payer] = collections.Counter()
        self._patient = 0  # callers of `wait`
        self._freed = asyncio.Event()
        self.total = 0

    def allocate(self, payer: Payer) -> Allocation:
        return Allocation(self, payer)

    def fits(self, payer: Payer, size: int) -> bool:
        held = self._held[payer] + size
        return held <= ALWAYS or (held <= self.each and self.total + size <= self.most)

    def take(self, payer: Payer, size: int) -> None:
        self._held[payer] += size
        self.total += size

    def give_back(self, payer: Payer, size: int) -> None:
        self.total -= size
        self._held[payer] -= size
        if not self._held[payer]:
            del self._held[payer]
        if self._patient:
            self._freed.set()
            self._freed = asyncio.Event()

    async def wait(self, payer: Payer, size: int) -> None:
        """Waits until the bytes fit, as long as it takes."""
        self._patient += 1
        try:
            while not self.fits(payer, size):
                await self._freed.wait()
        finally:
            self._patient -= 1

    async def wait_briefly(self, payer: Payer, size: int) -> None:
        """Waits until the bytes fit. Raises Fault when they do not fit soon."""
        if self._waiting[payer] >= WAITING:
            raise self._refuse()
        self._waiting[payer] += 1
        try:
            async with asyncio.timeout(self._patience):
                await self.wait(payer, size)
        except TimeoutError:
            raise self._refuse() from None
        finally:
            self._waiting[payer] -= 1
            if not self._waiting[payer]:
                del self._waiting[payer]

    def _refuse(self) -> Fault:
        error = "too many bytes of requests are under way"
        detail = f"one user or tenant has {self.each} at once, all together have {self.most}"
        hint = "Send less at once, or one request after the other; [quotas] request_bytes in k8e.toml allows more."
        return Fault(Kind.EXHAUSTED, "too_many_bytes", error, detail=detail, hint=hint, retry_after=1.0)


class Allocation:
    """The bytes that one request holds."""

    def __init__(self, memory: RequestMemory, payer: Payer) -> None:
        self._memory = memory
        self._payer = payer
        self.size = 0

    async def add(self, size: int, *, long_lived: bool = False) -> None:
        """Raises Fault when there is no room soon. A long-lived connection that holds little waits instead."""
        if not self._memory.fits(self._payer, size):
            little = long_lived and self.size + size <= LONG_LIVED
            await (self._memory.wait if little else self._memory.wait_briefly)(self._payer, size)
        self._memory.take(self._payer, size)
        self.size += size

    def try_add(self, size: int) -> bool:
        """False: there is no room now."""
        if not self._memory.fits(self._payer, size):
            return False
        self._memory.take(self._payer, size)
        self.size += size
        return True

    def remove(self, size: int) -> None:
        if size:
            self.size -= size
            self._memory.give_back(self._payer, size)

    def free(self) -> None:
        self.remove(self.size)
