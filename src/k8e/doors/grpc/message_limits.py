"""How many messages are in memory at once: while they arrive, and while large ones are dealt with. Payers take turns.

Callers who may say nothing for hours are counted instead of waited for. Whoever takes long to send a message, be it the
line or be it on purpose, makes room for others and is counted from then on. There are few places for the slow; who
finds none keeps their turn, unless somebody else waits for one: then they have to go. Nobody has one for ever.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from k8e.core.access.access import Payer
from k8e.core.access.turns import Turns
from k8e.core.errors import Fault, Kind
from k8e.doors.grpc.errors import GrpcRefusal, stalled
from k8e.doors.request_memory import RequestMemory

LARGE: Final = 1 << 20
ARRIVING_EACH, ARRIVING_ALL = 16, 64  # of one payer, of everybody
IDLE_EACH, IDLE_ALL = 64, 512  # callers with more to say, some time
SLOW_EACH, SLOW_ALL = 8, 64  # messages that take long to come
PROMPT: Final = 5.0  # what a message may take to come before it counts as slow
PATIENCE: Final = 300.0  # and before its call is ended


class MessageLimits:
    def __init__(self, prompt: float = PROMPT, memory: RequestMemory | None = None) -> None:
        self.memory = memory or RequestMemory()
        self.arriving = Turns(ARRIVING_ALL, each=ARRIVING_EACH)
        self.large = Turns(16, each=4)
        self.prompt = prompt
        self._idle: collections.Counter[Payer] = collections.Counter()
        self._slow: collections.Counter[Payer] = collections.Counter()

    def enter_slow(self, payer: Payer) -> bool:
        """Whether there is a peer. Then `leave_slow`."""
        if self._slow[payer] >= SLOW_EACH or self._slow.total() >= SLOW_ALL:
            return False
        self._slow[payer] += 1
        return True

    def leave_slow(self, payer: Payer) -> None:
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
    """One message on its way: in a turn at first, in a place for the slow when it takes long."""

    def __init__(self, messages: MessageLimits, payer: Payer, give_up: Callable[[Fault | GrpcRefusal], None]) -> None:
        self._messages = messages
        self._payer = payer
        self._give_up = give_up
        self._slow = False
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def expect(self, patience: float) -> AsyncIterator[None]:
        await self._messages.arriving.acquire(self._payer)
        loop, prompt = asyncio.get_running_loop(), self._messages.prompt
        self._timer = loop.call_later(prompt, self._make_room, patience, loop.time() + prompt + patience)
        try:
            yield
        finally:
            self.note()
            if self._slow:
                self._messages.leave_slow(self._payer)
            else:
                self._messages.arriving.release(self._payer)

    def note(self) -> None:
        """It is here; what it waits for now is ours."""
        if self._timer is not None:
            self._timer.cancel()

    def _make_room(self, patience: float, until: float) -> None:
        """Looks again and again, where there is no place for the slow."""
        loop = asyncio.get_running_loop()
        if self._messages.enter_slow(self._payer):
            self._slow = True
            self._messages.arriving.release(self._payer)
        elif self._messages.arriving.is_wanted(self._payer):
            error = "a message takes long to come, and others wait"
            detail = f"{SLOW_EACH} of one tenant may take longer than {self._messages.prompt:g} seconds at once"
            hint = "Send fewer at once, or in smaller pieces."
            self._give_up(Fault(Kind.EXHAUSTED, "too_many_slow", error, detail=detail, hint=hint, retry_after=10.0))
            return
        elif loop.time() < until:
            self._timer = loop.call_later(self._messages.prompt, self._make_room, patience, until)
            return
        self._timer = loop.call_at(until, self._give_up, stalled(patience))
