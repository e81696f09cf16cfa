"""Lets the creation of sessions go before the making of warm sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# After a create its caller is about to run the first command, which comes first. Creates without a pause must not keep
# the pool empty for ever, so this courtesy has an end, though never while a create is under way.
_PAUSE: Final = 0.05
_COURTESY: Final = 1.0


class Quiet:
    def __init__(self) -> None:
        self._creates = 0  # under way
        self._idle, self._busy = asyncio.Event(), asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a session is being created."""
        return self._creates > 0

    @contextmanager
    def disturb(self) -> Iterator[None]:
        """While a session is created."""
        self._creates += 1
        self._idle.clear()
        self._busy.set()
        try:
            yield
        finally:
            self._creates -= 1
            if not self._creates:
                self._idle.set()
                self._busy.clear()

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.time() + _COURTESY
        while True:
            await self._idle.wait()
            if loop.time() >= patience:
                return
            try:
                async with asyncio.timeout(_PAUSE):
                    await self._busy.wait()
            except TimeoutError:
                return
