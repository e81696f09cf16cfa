"""The port of a replica that all clients reach: forwards each connection to the leader's gateway, byte for byte.

TLS ends at the leader, so a forwarder reads nothing, authenticates no caller, and cannot speak for one. While there is
no leader that serves it keeps a client's first bytes and waits: for the client that is a slow connection, and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from k8e.core.log.daemon_log import format_event
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.addresses import name_source, split_address
from k8e.doors.connection_limits import UnauthenticatedLimit
from k8e.doors.grpc.connection import LAST_WRITE, Pause, ProxySide

HOLD: Final = 30.0  # seconds that a client waits for a leader
EARLY: Final = 64 << 10  # bytes of a client that are kept meanwhile
WAITING, WAITING_EACH = 512, 256  # clients that wait, of all and of one source; a new one takes the place of the oldest
_DIAL: Final = 3.0
_PAUSE: Final = 0.2

log = logging.getLogger("k8e.doors.grpc")


class Forwarder:
    def __init__(self, listener: socket.socket, leader: Callable[[], Awaitable[str]], most: int) -> None:
        """`leader` returns the address of the gateway that leads, once there is one; `most`: connections at once."""
        self.leader = leader
        self._listener = listener
        self._most = most
        self._acceptor = Acceptor(listener, self._take)
        self._waiting = UnauthenticatedLimit(WAITING, WAITING_EACH)
        self._connections: set[Forwarded] = set()

    @property
    def count(self) -> int:
        return len(self._connections)

    def open(self) -> None:
        self._acceptor.open()

    def close(self) -> None:
        """Accepts no more connections, and ends those that there are."""
        self._acceptor.close()
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    def forget(self, connection: Forwarded) -> None:
        self._connections.discard(connection)

    def _take(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        if len(self._connections) >= self._most:
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Forwarded(self, client)
        connection.arrived = self._waiting.add(name_source(address[0]), connection.abort)
        self._connections.add(connection)
        connection.start()


class Forwarded:
    """One connection: the client's side, and the leader's."""

    arrived: Callable[[], None]  # it waits no more

    def __init__(self, forwarder: Forwarder, client: socket.socket) -> None:
        self._forwarder = forwarder
        self._client = client
        self._outer = ProxySide(self._receive, lambda _: self.abort())
        self._inner = ProxySide(self._outer.write, self._end)
        self._outer.other, self._inner.other = self._inner, self._outer
        self._early = 0
        self._joined = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._ending: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._tasks.append(attach(lambda: self._outer, self._client, self.abort))
        self._tasks.append(asyncio.create_task(self._join()))

    def abort(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        for task in self._tasks:
            task.cancel()
        self.arrived()
        self._outer.abort()
        self._inner.abort()
        self._forwarder.forget(self)

    def _receive(self, data: bytes) -> None:
        self._inner.write(data)
        if not self._joined:
            self._early += len(data)
            if self._early >= EARLY:
                self._outer.pause(Pause.MEMORY)

    async def _join(self) -> None:
        """Connects to the leader. One that is told of may have ended a moment ago: then to the next one."""
        try:
            async with asyncio.timeout(HOLD):
                while not await self._dial(await self._forwarder.leader()):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            log.warning("%s", format_event("no_leader", {"seconds": HOLD}))
            self.abort()
            return
        self._joined = True
        self.arrived()
        self._outer.resume(Pause.MEMORY)

    async def _dial(self, address: str) -> bool:
        host, port = split_address(address)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_DIAL):
                await asyncio.get_running_loop().create_connection(lambda: self._inner, host, port)
            return True
        return False

    def _end(self, error: Exception | None) -> None:
        """The leader has ended the connection; a client that reads still gets the last bytes."""
        if error is not None:
            self._outer.write(self._inner.read_rest())
        self._outer.close()
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(LAST_WRITE, self.abort)
