"""Bytes that came in on a connection and are still in gRPC: of messages that are not whole yet.

gRPC does not say how many. So what came in is counted, less what was handed on, less what goes around it, which is
estimated: for a message by its size, for a call by its metadata. Who sends little around messages is charged for a
little less than there is, who sends very much around them for more, until no call is under way on the connection. They
are charged to the payer in steps, with all other bytes under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from k8e.doors.request_memory import Allocation

STEP: Final = 1 << 20
AROUND: Final = 64  # bytes of the frames of a small message
FRAMES: Final = 64  # one byte of so many is for the frames of a large one: those of HTTP/2, and small ones of TLS
HEAD: Final = 256  # of a call, besides its metadata, with what ends it
HEAD_MOST: Final = 2 << 10  # HPACK may have sent little of them
REPLIES: Final = 64  # so many bytes that go out let one come in that is no message's: what says that they arrived


def estimate_message(size: int) -> int:
    """What a message of that size took on the wire."""
    return size + size // FRAMES + AROUND


def estimate_head(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """And a call, without its messages."""
    return min(HEAD_MOST, HEAD + sum(len(name) + len(value) for name, value in metadata))


class BufferedBytes:
    def __init__(self, load: Allocation) -> None:
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
