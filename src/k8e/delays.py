"""Timers that hardly ever fire, for what every command sets and takes back: a deadline, a place that is given back.

A timer of the event loop takes twenty-five calls, because the loop sorts them. Those of one delay need no order but
their own: the oldest is due first, and the loop has one timer for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Delays:
    """Calls back after so many seconds. For one event loop."""

    __slots__ = ("_armed", "_entries", "_next", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: dict[int, tuple[float, Callable[[], object]]] = {}  # the oldest first
        self._next = 0
        self._armed = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, callback: Callable[[], object]) -> int:
        """`remove` takes what is returned; after that there is no call."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        self._next = number = self._next + 1
        self._entries[number] = (due, callback)
        if not self._armed:
            self._armed = True
            loop.call_at(due, self._fire)
        return number

    def remove(self, number: int) -> None:
        """Fine when it has fired."""
        self._entries.pop(number, None)

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            while self._entries:
                number, (due, callback) = next(iter(self._entries.items()))
                if due > now:
                    break
                del self._entries[number]
                callback()
        finally:  # a callback that fails keeps no other from being called
            self._armed = bool(self._entries)
            if self._entries:
                loop.call_at(next(iter(self._entries.values()))[0], self._fire)
