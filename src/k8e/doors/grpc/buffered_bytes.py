"""Counts the bytes of one connection that gRPC buffers: those of messages that are not whole yet.

gRPC does not tell how many. They are the bytes received, less the messages handed on, less the overhead of both, which
is estimated: for a message by its size, for a call by its metadata. A client with little overhead is charged for a
little less than there is, one with very much for more, until its connection has no open call. The bytes are charged to
the payer in steps, with all others in the request memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from k8e.doors.request_memory import Allocation

STEP: Final = 1 << 20
SMALL_OVERHEAD: Final = 64  # bytes around a small message
LARGE_OVERHEAD: Final = 64  # of a large message one byte in so many belongs to frames: HTTP/2's, and small ones of TLS
HEAD: Final = 256  # of a call, besides its metadata, with what ends it
HEAD_MOST: Final = 2 << 10  # HPACK may have compressed them
REPLIES: Final = 64  # for so many bytes sent one is received that belongs to no message: acknowledgements


def estimate_message(size: int) -> int:
    """Estimates the bytes on the wire of a message."""
    return size + size // LARGE_OVERHEAD + SMALL_OVERHEAD


def estimate_head(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Estimates the bytes on the wire of a call without its messages."""
    return min(HEAD_MOST, HEAD + sum(len(name) + len(value) for name, value in metadata))


class BufferedBytes:
    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self._size = 0

    def add(self, size: int) -> bool:
        """False: there is no memory for the bytes received."""
        self._size += size
        while self._size - self._allocation.size > STEP:
            if not self._allocation.try_add(STEP):
                return False
        return True

    async def wait(self) -> None:
        """Waits for memory. Raises Fault."""
        while self._size - self._allocation.size > STEP:
            await self._allocation.add(STEP)

    def remove(self, size: int) -> None:
        self._size = max(0, self._size - size)
        if self._allocation.size > self._size:
            self._allocation.remove((self._allocation.size - self._size + STEP - 1) // STEP * STEP)

    def clear(self) -> None:
        self._size = 0
        self._allocation.free()
