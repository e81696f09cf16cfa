"""The frames of a live run over HTTP: one byte kind, four bytes length (big endian), and that many bytes.

The kinds 0, 1 and 2 are the descriptors they come from or go to. Pure: bytes in, frames out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

CONTENT_TYPE = "application/x-k8e-frames"
HEADER = 5


class FrameKind(enum.IntEnum):
    STDIN = 0
    STDOUT = 1
    STDERR = 2
    REQUEST = 3  # JSON; the first frame of a request that streams its stdin
    STARTED = 4  # JSON; the first frame of an answer
    RESULT = 5  # JSON; the last frame of an answer
    ERROR = 6  # JSON; in place of a result
    PROGRESS = 7  # JSON; how far a long request is


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    data: bytes


class BadFrame(Exception):
    """The client sent bytes that are no frame."""


def pack_header(kind: FrameKind, length: int) -> bytes:
    return bytes((kind,)) + length.to_bytes(4, "big")


class FrameReader:
    """Cuts a byte stream into frames. `limit` bounds one frame, and so what is kept here."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def between_frames(self) -> bool:
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= HEADER:
            length = int.from_bytes(self._buffer[1:HEADER], "big")
            if length > self.limit:
                raise BadFrame(f"a frame of {length} bytes; {self.limit} is the most")
            if len(self._buffer) < HEADER + length:
                return
            kind, content = self._buffer[0], bytes(self._buffer[HEADER : HEADER + length])
            del self._buffer[: HEADER + length]
            try:
                yield Frame(FrameKind(kind), content)
            except ValueError:
                raise BadFrame(f"a frame of the unknown kind {kind}") from None
