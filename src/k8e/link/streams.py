"""One direction of a channel: its offsets, its window, and the bytes that wait on our side.

Neither class knows a socket. `Inbound` is filled by whoever reads the connection, which never waits for a consumer;
`Outbound` is emptied when the connection has room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from k8e.link.errors import BrokenInput, LinkError, ProtocolViolation
from k8e.link.protocol import INPUT_WINDOW, MAX_DATA

# Smaller neighbours are joined, so that a window full of single bytes does not cost a hundred times its size.
SMALL = 4096


class Bell:
    """Wakes everybody who waits; what they waited for they look up themselves, so a cancelled waiter loses nothing."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def ring(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _join_small(queue: deque[bytes], content: bytes) -> None:
    if queue and len(content) < SMALL and len(queue[-1]) < SMALL:
        queue[-1] += content
    else:
        queue.append(content)


class Inbound:
    """Bytes from the sandbox. Holds at most a window of them, and another one after a reattachment."""

    def __init__(self, window: int, acknowledge: Callable[[int], None] | None, start: int = 0) -> None:
        """Without `acknowledge` the agent keeps what was read, and gives it to whoever asks next."""
        self.window = window
        self._start = start
        self.position = start  # of the next byte for the consumer
        self.dropped = 0
        self.received = start  # offset of the next byte from the agent
        self.total: int | None = None
        self.queued = 0
        self.error: LinkError | None = None
        self.ended = False  # the agent said EOF on this connection
        self._acknowledge = acknowledge
        self._acked = start
        self._outstanding = 0  # bytes that came since then
        self._queue: deque[bytes] = deque()
        self._gaps: deque[tuple[int, int]] = deque()  # (offset, length), in order
        self._may_jump = False
        self._sink: Callable[[bytes], object] | None = None
        self._bell = Bell()

    @property
    def complete(self) -> bool:
        """Everything up to the end has come, on whichever connection."""
        return self.received == self.total

    # What the agent says

    def receive(self, offset: int, content: bytes) -> None:
        length = len(content)
        if offset != self.received or self.ended:
            self._jump(offset)
        self._outstanding += length
        if self._outstanding > self.window:
            raise ProtocolViolation(f"{self._outstanding} bytes in a window of {self.window}")
        self.received = offset + length
        if self.total is not None and self.received > self.total:
            raise ProtocolViolation("DATA beyond the stream's end")
        if self._sink is not None:
            self._cross_gap()
            self._consume(length)
            self._sink(content)
            return
        self.queued += length
        if self._gaps and sum(self._gaps[-1]) == offset:
            self._queue.append(content)  # nothing is joined across a gap
        else:
            _join_small(self._queue, content)
        self._bell.ring()

    def finish(self, total: int) -> None:
        if self.ended or (self.total is not None and total != self.total):
            raise ProtocolViolation("a stream ended twice")
        if total != self.received:
            self._jump(total)
        self.ended = True
        self.total = total
        if self._sink is not None:
            self._cross_gap()
        self._bell.ring()

    def resume_offset(self) -> int:
        """Where a new attachment is to go on. What is queued beyond one window is asked for again: an attachment may
        bring a window of bytes whatever the consumer has left, and a third one must find room too."""
        while self.queued > self.window:
            lost = len(self._queue.pop())
            self.queued -= lost
            self.received -= lost
            self._forget_last_gap()
        self.ended = False
        return self.received

    def reattach(self, start: int) -> None:
        """The stream goes on at `start` over a new connection."""
        if start < self.received:
            raise ProtocolViolation(f"resumed at {start}, asked for {self.received}")
        self._may_jump = True
        # Asking for an offset acknowledged what lies below it, though some of that may still be queued here: were it
        # otherwise, an ACK lost with its connection would leave both sides waiting for ever.
        self._acked = self.received
        self._outstanding = 0
        if start > self.received:
            self._skip(start)
            if self.position == self._start:
                self._cross_gap()

    def _jump(self, offset: int) -> None:
        if self.ended:
            raise ProtocolViolation("DATA after EOF")
        if offset < self.received or not self._may_jump:
            raise ProtocolViolation(f"offset {offset}, expected {self.received}")
        self._may_jump = False
        self._skip(offset)

    def _skip(self, offset: int) -> None:
        """The agent dropped bytes while nobody was attached."""
        self._forget_last_gap()
        self._gaps.append((self.received, offset - self.received))
        self.received = offset

    def _forget_last_gap(self) -> None:
        if self._gaps and sum(self._gaps[-1]) == self.received:
            self.received = self._gaps.pop()[0]

    def _cross_gap(self) -> None:
        """Only for who goes on: after a read, position is the end of what was read, and not of a gap behind it."""
        while self._gaps and self._gaps[0][0] == self.position:
            _, length = self._gaps.popleft()
            self.position += length
            self.dropped += length

    # What the consumer does

    @property
    def ready(self) -> bool:
        """`read` would not wait."""
        return bool(self._queue) or self.complete or self.error is not None

    async def read(self) -> bytes:
        """The next bytes, b"" at the end. What came before the link failed is still given."""
        self._cross_gap()
        while not self._queue:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._bell.wait()
            self._cross_gap()
        content = self._queue.popleft()
        self.queued -= len(content)
        self._consume(len(content))
        return content

    def divert(self, sink: Callable[[bytes], object]) -> None:
        """Gives what is here and all that comes to `sink`, at once and from inside the connection's reader."""
        self._sink = sink
        self._cross_gap()
        while self._queue:
            content = self._queue.popleft()
            self.queued -= len(content)
            self._consume(len(content))
            sink(content)
            self._cross_gap()
        self._bell.ring()

    def fail(self, error: LinkError) -> None:
        self.error = self.error or error
        self._bell.ring()

    def _consume(self, length: int) -> None:
        self.position += length
        if self._acknowledge is None:
            return
        if (self.position - self._acked) * 4 >= self.window and not self.ended and self.error is None:
            self._acked = self.position
            self._outstanding = self.queued
            self._acknowledge(self.position)


class Outbound:
    """Bytes to the sandbox. Keeps what is not acknowledged, at most a window, for the case of a new connection."""

    def __init__(self) -> None:
        self.acked = 0
        self.sent = 0
        self.end: int | None = None  # the total, once we know it
        self.broken = False
        self.error: LinkError | None = None
        self._kept: deque[bytes] = deque()  # [acked, sent), the first may begin earlier
        self._waiting: deque[bytes] = deque()  # [sent, written)
        self._kept_from = 0
        self._written = 0
        self._bell = Bell()

    @property
    def queued(self) -> int:
        return self._written - self.acked

    # What the agent says

    def acknowledge(self, offset: int) -> None:
        if not self.acked <= offset <= self.sent:
            raise ProtocolViolation(f"ACK of {offset}, sent {self.acked} to {self.sent}")
        self.acked = offset
        while self._kept and self._kept_from + len(self._kept[0]) <= offset:
            self._kept_from += len(self._kept.popleft())
        self._bell.ring()

    def abort(self, offset: int) -> None:
        """Nobody reads any more."""
        if offset > self.sent:
            raise ProtocolViolation(f"{offset} bytes were read, {self.sent} were sent")
        self.stop()

    def resume(self, received: int) -> None:
        """A new connection goes on at `received`."""
        if self.broken:
            return
        if not self.acked <= received <= self.sent:
            raise ProtocolViolation(f"{received} bytes were received, sent {self.acked} to {self.sent}")
        self._waiting.extendleft(reversed(self._kept))
        self._kept.clear()
        at = self._kept_from
        while self._waiting and at + len(self._waiting[0]) <= received:
            content = self._waiting.popleft()
            at += len(content)
            self._kept.append(content)
        if self._waiting and at < received:
            content = self._waiting.popleft()
            self._kept.append(content[: received - at])
            self._waiting.appendleft(content[received - at :])
        self.sent = received

    def adopt(self, received: int) -> None:
        """An attachment to a command that somebody else has written to."""
        self.acked = self.sent = self._written = self._kept_from = received

    # What the producer does

    async def write(self, content: bytes | memoryview, pump: Callable[[], None]) -> None:
        """Waits while the window is full. Cancelled, it may have taken a part."""
        self._check()
        if self.end is not None:
            raise ValueError("the stream is closed already")
        rest = memoryview(content)
        while rest:
            self._check()
            room = min(INPUT_WINDOW - self.queued, MAX_DATA)
            if room <= 0:
                await self._bell.wait()
                continue
            piece = bytes(rest[:room])
            rest = rest[room:]
            self._written += len(piece)
            _join_small(self._waiting, piece)
            pump()
        self._check()

    def close(self) -> None:
        if self.end is None:
            self.end = self._written

    def take(self) -> tuple[int, bytes] | None:
        """What is to be sent next, with its offset."""
        if not self._waiting:
            return None
        content = self._waiting.popleft()
        offset = self.sent
        self.sent += len(content)
        _join_small(self._kept, content)
        return offset, content

    def fail(self, error: LinkError) -> None:
        self.error = self.error or error
        self.stop()

    def stop(self) -> None:
        self.broken = True
        self._kept.clear()
        self._waiting.clear()
        self._bell.ring()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.broken:
            raise BrokenInput("nobody reads this any more")
