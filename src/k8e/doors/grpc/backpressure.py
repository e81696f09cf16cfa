"""One side of a proxied connection: while its peer does not read, the other side is not read from."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable


class Pause(enum.Enum):
    """Why a side is not read from."""

    PEER = enum.auto()  # the other side's peer does not read
    MEMORY = enum.auto()  # there is no room for more bytes
    UNAUTHENTICATED = enum.auto()  # the peer has sent all that an unauthenticated one may send


class ProxySide(asyncio.Protocol):
    other: ProxySide

    def __init__(self, receive: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        self._receive = receive
        self._lose = lose
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # written before there was a connection
        self._pauses: set[Pause] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        for data in self._early:
            transport.write(data)
        self._early = []
        if self._pauses:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)
        else:
            self._early.append(data)

    def pause_writing(self) -> None:
        self.other.pause(Pause.PEER)

    def resume_writing(self) -> None:
        self.other.resume(Pause.PEER)

    def pause(self, why: Pause) -> None:
        self._pauses.add(why)
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self, why: Pause) -> None:
        self._pauses.discard(why)
        if self.transport is not None and not self._pauses:
            self.transport.resume_reading()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
