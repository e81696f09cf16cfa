"""A stream in which every byte says where it belongs: 64-bit counters, little endian, from 0.

What is lost, repeated or swapped anywhere shows at once, with its offset, however the stream was cut into chunks.
"""

from __future__ import annotations

import sys
from array import array

from k8e.conformance.subject import equal, holds
from k8e.link.model import ByteReader

# Arguments: bytes in all, and optionally the descriptor to write to.
WRITE_COUNTERS = """
import os, sys
from array import array
total, fd, at = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, 0
while at < total:
    block = memoryview(array("Q", range(at // 8, at // 8 + 8192)).tobytes())[: total - at]
    at += len(block)
    while block:
        block = block[os.write(fd, block):]
"""


def counters(start: int, end: int) -> bytes:
    """The bytes of the stream from one offset to another."""
    first = start // 8
    values = array("Q", range(first, (end + 7) // 8))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()[start - first * 8 : end - first * 8]


class CounterStream:
    """Checks a stream against the counters while it comes in."""

    def __init__(self, start: int = 0) -> None:
        self.position = start
        self.received = 0

    def take(self, chunk: bytes, end: int | None = None) -> None:
        """The next chunk. `end` is where the reader says it ends; without it, nothing may be missing."""
        start = self.position if end is None else end - len(chunk)
        holds(f"chunk does not begin before {self.position}, where the last one ended", start >= self.position, start)
        if chunk != counters(start, start + len(chunk)):
            value = int.from_bytes(chunk[-start % 8 :][:8], "little")
            raise AssertionError(f"bytes at offset {start} are not those written there: found counter {value}")
        self.position = start + len(chunk)
        self.received += len(chunk)

    async def take_all(self, reader: ByteReader) -> None:
        while chunk := await reader.read():
            self.take(chunk)

    def complete(self, what: str, total: int) -> None:
        equal(f"bytes of {what}", self.position, total)
