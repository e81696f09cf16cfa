"""Noticing that a client has gone away, also while nobody reads from its connection."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable


class Disconnects:
    """One epoll for all connections, asked only for the hang-up that is always reported, and watched by the loop.

    Reading until the end of the stream would not do: while a command does not take its stdin we must not read, and a
    client that has merely finished sending is still there.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._notice)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()

    def watch(self, descriptor: int, callback: Callable[[], object]) -> int:
        """Calls back once when the other end is closed. Returns what to `forget`, which has to be done.

        A duplicate is watched: asyncio closes its descriptor when it likes, and soon the number is another client's.
        """
        duplicate = os.dup(descriptor)
        self._callbacks[duplicate] = callback
        self._epoll.register(duplicate, select.EPOLLONESHOT)
        return duplicate

    def forget(self, duplicate: int) -> None:
        del self._callbacks[duplicate]
        self._epoll.unregister(duplicate)
        os.close(duplicate)

    def _notice(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            self._callbacks[descriptor]()
