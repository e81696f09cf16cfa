"""How many bytes of requests are in memory, of one payer and of all, at every door: while they arrive, and until they
are dealt with.

Who sends more than there is room for is not read from for a moment, and refused when that does not help. A little is
always let through, so that callers who fill the memory keep no other from a command. Connections that last, and hold
little, are not read from as long as it takes: other requests of their user do not end them.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Final

from k8e.core.access.access import Payer
from k8e.core.errors import Fault, Kind

EACH: Final = 512 << 20  # of one payer; [quotas] request_bytes says otherwise
SHARES: Final = 4  # so many times as much of all together
LITTLE: Final = 4 << 20  # of one payer, whatever others have
SMALL: Final = 2 << 20  # of a connection that lasts: a frame of input that is not whole, and a piece
PATIENCE: Final = 5.0
WAITING: Final = 16  # of one payer, for room; each has something in a buffer


class Freight:
    def __init__(self, each: int = EACH, most: int | None = None, *, patience: float = PATIENCE) -> None:
        self.each = each
        self.most = most or each * SHARES
        self._patience = patience
        self._held: collections.Counter[Payer] = collections.Counter()
        self._waiting: collections.Counter[Payer] = collections.Counter()
        self._freed = asyncio.Event()
        self.total = 0

    def load(self, payer: Payer) -> Load:
        return Load(self, payer)

    def fits(self, payer: Payer, size: int) -> bool:
        held = self._held[payer] + size
        return held <= LITTLE or (held <= self.each and self.total + size <= self.most)

    def take(self, payer: Payer, size: int) -> None:
        self._held[payer] += size
        self.total += size

    def give_back(self, payer: Payer, size: int) -> None:
        self.total -= size
        self._held[payer] -= size
        if not self._held[payer]:
            del self._held[payer]
        self._freed.set()
        self._freed = asyncio.Event()

    async def wait(self, payer: Payer, size: int) -> None:
        """Until it fits, as long as it takes."""
        while not self.fits(payer, size):
            await self._freed.wait()

    async def wait_a_moment(self, payer: Payer, size: int) -> None:
        """The same. Raises Fault when it does not fit soon."""
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


class Load:
    """What one request holds."""

    def __init__(self, freight: Freight, payer: Payer) -> None:
        self._freight = freight
        self._payer = payer
        self.size = 0

    async def add(self, size: int, *, lasting: bool = False) -> None:
        """Raises Fault when there is no room soon. A connection that lasts waits for it while its load is small."""
        if not self._freight.fits(self._payer, size):
            small = lasting and self.size + size <= SMALL
            await (self._freight.wait if small else self._freight.wait_a_moment)(self._payer, size)
        self._freight.take(self._payer, size)
        self.size += size

    def try_add(self, size: int) -> bool:
        """The same at once. False: there is no room."""
        if not self._freight.fits(self._payer, size):
            return False
        self._freight.take(self._payer, size)
        self.size += size
        return True

    def remove(self, size: int) -> None:
        if size:
            self.size -= size
            self._freight.give_back(self._payer, size)

    def free(self) -> None:
        self.remove(self.size)
