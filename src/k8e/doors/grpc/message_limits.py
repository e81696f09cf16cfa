"""Limits the messages in memory: those that are arriving, and large ones until their call is answered.

Payers take turns. A message that takes long to arrive, because of a slow line or on purpose, frees its turn and is
counted as slow. There are few slow messages; where there is no room for one more, it keeps its turn, unless another
payer waits for the turn: then its call is given up. Every message has a last deadline. A call that may send nothing for
hours is counted as idle and takes no turn.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from k8e.core.access.access import Payer
from k8e.core.access.turns import Turns
from k8e.core.errors import Fault, Kind
from k8e.delays import Delays
from k8e.doors.grpc.errors import GrpcRefusal, stalled
from k8e.doors.request_memory import RequestMemory

LARGE: Final = 1 << 20
ARRIVING_EACH, ARRIVING_ALL = 16, 64  # of one payer, of all
IDLE_EACH, IDLE_ALL = 64, 512  # calls whose next message may come hours later
SLOW_EACH, SLOW_ALL = 8, 64
PROMPT: Final = 5.0  # seconds after which an arriving message is slow
PATIENCE: Final = 300.0  # further seconds after which its call is given up


class MessageLimits:
    def __init__(self, prompt: float = PROMPT, memory: RequestMemory | None = None) -> None:
        self.memory = memory or RequestMemory()
        self.arriving = Turns(ARRIVING_ALL, each=ARRIVING_EACH)
        self.large = Turns(16, each=4)
        self.prompt = prompt
        self.prompts = Delays(prompt)
        self._idle: collections.Counter[Payer] = collections.Counter()
        self._slow: collections.Counter[Payer] = collections.Counter()

    def add_slow(self, payer: Payer) -> bool:
        """False: there are too many. Otherwise `remove_slow` has to follow."""
        if self._slow[payer] >= SLOW_EACH or self._slow.total() >= SLOW_ALL:
            return False
        self._slow[payer] += 1
        return True

    def remove_slow(self, payer: Payer) -> None:
        self._slow[payer] -= 1
        self._slow = +self._slow

    @contextmanager
    def idle(self, payer: Payer) -> Iterator[None]:
        if self._idle[payer] >= IDLE_EACH or self._idle.total() >= IDLE_ALL:
            error = f"{IDLE_EACH} commands with input, and agents, at once is the most"
            raise Fault(Kind.EXHAUSTED, "too_many_streams", error, hint="End some of them.", retry_after=10.0)
        self._idle[payer] += 1
        try:
            yield
        finally:
            self._idle[payer] -= 1
            self._idle = +self._idle


class Arrival:
    """One arriving message: it has a turn at first, and is slow later."""

    def __init__(self, limits: MessageLimits, payer: Payer, give_up: Callable[[Fault | GrpcRefusal], None]) -> None:
        self._limits = limits
        self._payer = payer
        self._give_up = give_up
        self._slow = False
        self._prompt = 0  # the first timer; nearly every message comes before it fires
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, patience: float) -> None:
        """Waits for the message's turn. `end` has to follow."""
        await self._limits.arriving.acquire(self._payer)
        self._prompt = self._limits.prompts.add(lambda: self._become_slow(patience, None))

    def end(self) -> None:
        self.finish()
        if self._slow:
            self._limits.remove_slow(self._payer)
        else:
            self._limits.arriving.release(self._payer)

    def finish(self) -> None:
        """The message is here; from now on the daemon is waited for, not the client."""
        self._limits.prompts.remove(self._prompt)
        if self._timer is not None:
            self._timer.cancel()

    def _become_slow(self, patience: float, until: float | None) -> None:
        """Tries again later where there are too many slow messages."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience if until is None else until
        if self._limits.add_slow(self._payer):
            self._slow = True
            self._limits.arriving.release(self._payer)
        elif self._limits.arriving.is_wanted(self._payer):
            error = "a message takes long to come, and others wait"
            detail = f"{SLOW_EACH} of one tenant may take longer than {self._limits.prompt:g} seconds at once"
            hint = "Send fewer at once, or in smaller pieces."
            self._give_up(Fault(Kind.EXHAUSTED, "too_many_slow", error, detail=detail, hint=hint, retry_after=10.0))
            return
        elif loop.time() < until:
            self._timer = loop.call_later(self._limits.prompt, self._become_slow, patience, until)
            return
        self._timer = loop.call_at(until, self._give_up, stalled(patience))
