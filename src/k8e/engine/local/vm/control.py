"""Questions to our first process in a guest, over a connection of their own: out-of-memory kills, clock, end.

What it answers is the guest's word, like the agent's: it concerns that guest only, and has a limit and a deadline. A
question has a number, which its answer repeats: one that comes late is not taken for the answer to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from typing import Final

from k8e.link.dial import PlainDialer
from k8e.link.errors import LinkError

_DEADLINE: Final = 2.0
_HALT_DEADLINE: Final = 20.0
_CLOCK_AGE: Final = 600.0  # seconds after which a guest's clock is set again: it may have waited in the pool for days
_LONGEST: Final = 4096
_KILLS: Final = re.compile(rb"oom_kills=([0-9]{1,18})")


class Control:
    def __init__(self, dial: PlainDialer) -> None:
        self._dial = dial
        self._lock = asyncio.Lock()
        # Another daemon's questions may still be on their way.
        self._numbers = itertools.count(secrets.randbelow(1 << 31))
        self._kills = 0  # as far as is known
        self._clock_set = -_CLOCK_AGE  # in the machine's time since its boot, in which it may have slept
        self.trace = ""  # of its boot: microseconds since the kernel's start

    async def count_kills(self) -> int:
        """Set back with each start of the machine. The last number known when the guest does not answer in time."""
        if _now() - self._clock_set < _CLOCK_AGE:
            await self._ask(b"status", _DEADLINE)
        else:
            await self.set_clock()
        return self._kills

    async def set_clock(self) -> None:
        if await self._ask(b"clock %d" % time.time_ns(), _DEADLINE):
            self._clock_set = _now()

    async def halt(self) -> bool:
        """Ends everything inside and writes what is not on the disk yet. False when it did not say so in time."""
        return await self._ask(b"halt", _HALT_DEADLINE) == b"halted"

    async def _ask(self, question: bytes, deadline: float) -> bytes:
        async with self._lock:
            answer = b""
            with contextlib.suppress(OSError, LinkError, TimeoutError):
                async with asyncio.timeout(deadline):
                    answer = await self._exchange(b"%d" % next(self._numbers), question)
        if found := _KILLS.search(answer):
            self._kills = max(self._kills, int(found[1]))
            self.trace = answer.decode(errors="replace")
        return answer

    async def _exchange(self, number: bytes, question: bytes) -> bytes:
        connection = await self._dial()
        loop, heard = asyncio.get_running_loop(), b""
        try:
            await loop.sock_sendall(connection, b"%b %b\n" % (number, question))
            while len(heard) < _LONGEST and (more := await loop.sock_recv(connection, _LONGEST)):
                *lines, rest = (heard + more).split(b"\n")
                for line in lines:
                    told, _, answer = line.partition(b" ")
                    if told == number:
                        return answer
                heard = rest
            return b""
        finally:
            connection.close()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
