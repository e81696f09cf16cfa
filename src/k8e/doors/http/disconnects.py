"""Notices that a client has disconnected, also while its connection is not read."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable


class Disconnects:
    """One epoll for all connections, watched by the loop. It asks for no events: EPOLLHUP is always reported.

    Reading to the end of the stream does not tell it: a connection is not read while its command takes no stdin, and a
    client that has only finished sending is still there.
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
        """Calls back once when the other end is closed. The caller has to `forget` what is returned.

        A duplicate is watched, because asyncio may close its descriptor and the number then becomes another client's.
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
