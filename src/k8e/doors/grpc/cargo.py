"""Bytes that came in on a connection and are still in gRPC: of messages that are not whole yet.

gRPC does not say how many. So what came in is counted, less what was handed on, less a generous share for what goes
around messages; where that share is too large, a message counts for less, never for more. They are charged to the
payer in steps, with all other bytes under way.
"""

from __future__ import annotations

from typing import Final

from k8e.doors.freight import Load

STEP: Final = 1 << 20
AROUND: Final = 2 << 10  # a call's head, a message's frames
REPLIES: Final = 64  # so many bytes that go out let one come in that is no message's: what says that they arrived


class Cargo:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._size = 0

    def add(self, size: int) -> bool:
        """False: there is no room for what has come."""
        self._size += size
        while self._size - self._load.size > STEP:
            if not self._load.try_add(STEP):
                return False
        return True

    async def wait(self) -> None:
        """For room. Raises Fault."""
        while self._size - self._load.size > STEP:
            await self._load.add(STEP)

    def take_out(self, size: int) -> None:
        self._size = max(0, self._size - size)
        if self._load.size > self._size:
            self._load.remove((self._load.size - self._size + STEP - 1) // STEP * STEP)

    def clear(self) -> None:
        self._size = 0
        self._load.free()
