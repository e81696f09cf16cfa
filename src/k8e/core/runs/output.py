"""Output that is kept within bounds: the first half and the last half, and exactly how much there was. Pure."""

from __future__ import annotations

from k8e.core.model import OUTPUT_LIMIT


class HeadTail:
    """Takes a stream of any length, in pieces of any size, and keeps at most `limit` bytes of it."""

    def __init__(self, limit: int = OUTPUT_LIMIT) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._head_room = limit - limit // 2
        self._tail = bytearray()
        self._tail_limit = limit // 2

    def feed(self, content: bytes) -> None:
        self.total += len(content)
        if self._head_room:
            kept = content[: self._head_room]
            self._head += kept
            self._head_room -= len(kept)
            content = content[len(kept) :]
        self._tail += content[max(0, len(content) - self._tail_limit) :]
        # Cut rarely: each cut moves what stays.
        if len(self._tail) > 2 * self._tail_limit:
            self._cut_tail()

    def _cut_tail(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def truncated(self) -> bool:
        return self.total > self._limit

    def take(self) -> bytes:
        self._cut_tail()
        return bytes(self._head + self._tail)
