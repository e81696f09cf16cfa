"""One direction of a channel: its offsets, its window, and the bytes that wait in the daemon.

Neither class knows a socket. The connection's reader fills `Inbound` and never waits for a consumer; `Outbound` is
emptied when the connection has room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from k8e.link.codec.protocol import INPUT_WINDOW, MAX_DATA
from k8e.link.errors import BrokenInput, LinkError, ProtocolViolation

# Smaller neighbours are joined, so that a window full of single bytes does not cost a hundred times its size.
SMALL = 4096


class Notifier:
    """Wakes all waiters. Each then checks its own condition, so a cancelled waiter loses nothing."""

    __slots__ = ("_waiters", "listener")

    def __init__(self) -> None:
        self.listener: Callable[[], object] | None = None  # called as well
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        if self.listener is not None:
            self.listener()
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

    def __init__(self, window: int, acknowledge: Callable[[int], None] | None, start: int = 0, keep: int = 0) -> None:
        """Without `acknowledge` the agent keeps what was read and sends it again on the next attachment. `keep`: the
        last so many bytes of what was read are never acknowledged."""
        self.window = window
        self._keep = keep
        self._step = min(window // 4, keep or window)  # bytes that are acknowledged at once
        self._solid = start  # where the last gap ended that was crossed
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
        self._changed = Notifier()

    @property
    def complete(self) -> bool:
        """Whether everything up to the end has arrived, over any connection."""
        return self.received == self.total

    # Frames from the agent

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
        self._changed.notify()

    def finish(self, total: int) -> None:
        if self.ended or (self.total is not None and total != self.total):
            raise ProtocolViolation("a stream ended twice")
        if total != self.received:
            self._jump(total)
        self.ended = True
        self.total = total
        if self._sink is not None:
            self._cross_gap()
        self._changed.notify()

    def resume_offset(self) -> int:
        """Returns the offset at which a new attachment goes on. Bytes queued beyond one window are requested again:
        each attachment may bring a window of bytes, however much the consumer has left unread."""
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
        """Notes a gap: the agent dropped bytes while no caller was attached."""
        self._forget_last_gap()
        self._gaps.append((self.received, offset - self.received))
        self.received = offset

    def _forget_last_gap(self) -> None:
        if self._gaps and sum(self._gaps[-1]) == self.received:
            self.received = self._gaps.pop()[0]

    def _cross_gap(self) -> None:
        """Moves the position over a gap. Called before the next read: until then the position is the end of the last
        read, not of the gap behind it."""
        while self._gaps and self._gaps[0][0] == self.position:
            _, length = self._gaps.popleft()
            self.position += length
            self.dropped += length
            self._solid = self.position

    # Called by the consumer

    @property
    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return bool(self._queue) or self.complete or self.error is not None

    def listen(self, callback: Callable[[], object] | None) -> None:
        self._changed.listener = callback

    async def read(self) -> bytes:
        """Returns the next bytes, b"" at the end. Bytes that arrived before the link failed can still be read."""
        if not await self._wait():
            return b""
        content = self._queue.popleft()
        self.queued -= len(content)
        self._consume(len(content))
        return content

    async def read_all(self) -> tuple[bytes, ...]:
        """Returns all that is here, up to the next gap, in the pieces in which it came: joining them would cost a copy.
        Empty at the end."""
        if not await self._wait():
            return ()
        length = self._gaps[0][0] - self.position if self._gaps else self.queued
        pieces = [self._queue.popleft()]
        taken = len(pieces[0])
        while taken < length:
            pieces.append(self._queue.popleft())
            taken += len(pieces[-1])
        self.queued -= taken
        self._consume(taken)
        return tuple(pieces)

    async def _wait(self) -> bool:
        """Until there is something to read; False at the end."""
        self._cross_gap()
        while not self._queue:
            if self.complete:
                return False
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._changed.wait()
            self._cross_gap()
        return True

    def divert(self, sink: Callable[[bytes], object]) -> None:
        """Passes what is queued and all that arrives to `sink`, called from the connection's reader."""
        self._sink = sink
        self._cross_gap()
        while self._queue:
            content = self._queue.popleft()
            self.queued -= len(content)
            self._consume(len(content))
            sink(content)
            self._cross_gap()
        self._changed.notify()

    def fail(self, error: LinkError) -> None:
        self.error = self.error or error
        self._changed.notify()

    def _consume(self, length: int) -> None:
        self.position += length
        if self._acknowledge is None:
            return
        # What is kept must not reach over a gap: then it would be counted as more bytes than there are.
        through = self.position - self._keep
        due = through - self._acked >= self._step and through >= self._solid
        if due and not self.ended and self.error is None:
            self._acked = through
            self._outstanding = self._keep + self.queued
            self._acknowledge(through)


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
        self._changed = Notifier()

    @property
    def queued(self) -> int:
        return self._written - self.acked

    # Frames from the agent

    def acknowledge(self, offset: int) -> None:
        if not self.acked <= offset <= self.sent:
            raise ProtocolViolation(f"ACK of {offset}, sent {self.acked} to {self.sent}")
        self.acked = offset
        while self._kept and self._kept_from + len(self._kept[0]) <= offset:
            self._kept_from += len(self._kept.popleft())
        self._changed.notify()

    def abort(self, offset: int) -> None:
        """The command does not read its input any more."""
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
        """Starts at the offset that an earlier attachment has written up to."""
        self.acked = self.sent = self._written = self._kept_from = received

    # Called by the producer

    async def write(self, content: bytes | memoryview, pump: Callable[[], None]) -> None:
        """Waits while the window is full. When cancelled it may have taken a part."""
        self._check()
        if self.end is not None:
            raise ValueError("the stream is closed already")
        rest = memoryview(content)
        while rest:
            self._check()
            room = min(INPUT_WINDOW - self.queued, MAX_DATA)
            if room <= 0:
                await self._changed.wait()
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
        """Returns the next bytes to send, with their offset."""
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
        self._changed.notify()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.broken:
            raise BrokenInput("the command does not read its input any more")
