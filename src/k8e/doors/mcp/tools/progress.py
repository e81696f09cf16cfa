"""Progress notifications: the latest state of a call, sent at most once in an interval."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

SendProgress = Callable[[float, str], Awaitable[None]]  # a number that only grows, and a message
State = Callable[[], tuple[float, str]]


class ProgressNotifier:
    """States that come faster than the interval replace one another."""

    def __init__(self) -> None:
        self._latest: State | None = None
        self._changed = asyncio.Event()

    def note(self, state: State) -> None:
        """`state` is called when its notification is sent, and not at all when another one replaces it."""
        self._latest = state
        self._changed.set()

    async def send_all(self, send: SendProgress, interval: float) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._latest is not None:
                await send(*self._latest())
            await asyncio.sleep(interval)


@contextlib.asynccontextmanager
async def notify(send: SendProgress | None, interval: float) -> AsyncIterator[ProgressNotifier]:
    """Sends notifications until the block ends. Without `send` the client asked for none."""
    notifier = ProgressNotifier()
    sending = asyncio.create_task(notifier.send_all(send, interval)) if send else None
    try:
        yield notifier
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
