"""One connection of the gateway: the client's side, the side of gRPC, and the bytes that are buffered between them."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from k8e.core.access.access import Payer
from k8e.core.errors import Fault
from k8e.doors.acceptor import attach
from k8e.doors.connection_limits import Peer
from k8e.doors.grpc.buffered_bytes import REPLIES, BufferedBytes, estimate_message

if TYPE_CHECKING:
    from k8e.doors.grpc.call import Call
    from k8e.doors.grpc.proxy import Proxy

UNAUTHENTICATED_BYTES: Final = 256 << 10  # that an unauthenticated peer may send
# After that the connection is not read until its caller is authenticated, because a large message may arrive faster
# than its call is dispatched. A peer that is still unauthenticated after so many seconds is disconnected.
UNAUTHENTICATED_WAIT: Final = 10.0
READ: Final = 64 << 10
LAST_WRITE: Final = 10.0  # seconds for a client to read what gRPC sent last


class Reading(enum.Enum):
    """Whether a call waits for a message."""

    NOT = enum.auto()
    SOON = enum.auto()
    IDLE = enum.auto()  # the next message may come hours later


class Connection:
    peer: Peer

    def __init__(self, proxy: Proxy, client: socket.socket, name: str) -> None:
        self.name = name
        self._proxy = proxy
        self._client = client
        self._outer = ProxySide(self._receive, lambda _: self.abort())  # the client's
        self._inner = ProxySide(self._send, self._end)  # gRPC's
        self._outer.other, self._inner.other = self._inner, self._outer
        self._received = 0  # bytes, while the peer is unauthenticated
        self._dialled = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._calls: set[Call] = set()
        self._buffered: BufferedBytes | None = None  # of an authenticated peer
        self._waiting: asyncio.Task[None] | None = None  # for memory
        self._cutting: asyncio.TimerHandle | None = None  # disconnects an unauthenticated peer that sent too much
        self._ending: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._tasks.append(attach(lambda: self._outer, self._client, self.abort))

    def abort(self) -> None:
        for timer in (self._ending, self._cutting):
            if timer is not None:
                timer.cancel()
        for task in (*self._tasks, *([self._waiting] if self._waiting else ())):
            task.cancel()
        self._drop_buffered()
        self._outer.abort()
        self._inner.abort()
        self._proxy.forget(self)

    # Authentication

    def authenticate(self, payer: Payer) -> bool:
        """False: the payer has too many connections."""
        if self.peer.payer == payer:
            return True
        if not self._proxy.connection_limits.authenticate(self.peer, payer):
            return False
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None
            self._outer.resume(Pause.UNAUTHENTICATED)
        self._drop_buffered()
        self._buffered = BufferedBytes(self._proxy.memory.allocate(payer))
        return True

    def refuse(self) -> None:
        """Notes a call without a valid certificate."""
        self._proxy.connection_limits.note_request(self.peer)
        if self.peer.payer is not None:  # an unauthenticated peer's bytes add up over all its calls
            self._received = 0
            self._drop_buffered()
            self._proxy.connection_limits.deauthenticate(self.peer)

    # Bytes of messages that gRPC has not handed on

    def open_call(self, call: Call, head: int) -> None:
        """`head`: bytes of the call that belong to no message. `close_call` has to follow."""
        self._calls.add(call)
        if self._buffered is not None:
            self._buffered.remove(head)

    def close_call(self, call: Call) -> None:
        self._calls.discard(call)
        if not self._calls and self._buffered is not None:
            self._buffered.clear()

    def note_message(self, size: int) -> None:
        """gRPC has handed on a message of that size."""
        if self._buffered is not None:
            self._buffered.remove(estimate_message(size))

    def _drop_buffered(self) -> None:
        if self._buffered is not None:
            self._buffered.clear()
            self._buffered = None

    async def _wait_for_memory(self, buffered: BufferedBytes) -> None:
        """The client is not read meanwhile. Where that does not help, calls whose messages are arriving are given up:
        those that wait for one soon, or else the idle ones."""
        try:
            await buffered.wait()
        except Fault as fault:
            for reading in (Reading.SOON, Reading.IDLE):
                if waiting := [call for call in self._calls if call.reading is reading]:
                    for call in waiting:
                        call.give_up(fault)
                    break
            buffered.clear()
        if buffered is not self._buffered:  # the peer was authenticated anew, or refused
            buffered.clear()
        self._waiting = None
        self._outer.resume(Pause.MEMORY)

    # From side to side

    def _receive(self, data: bytes) -> None:
        """Forwards bytes of the client. The first ones open the connection to gRPC."""
        if self.peer.payer is None:
            self._received += len(data)
            if self._received > UNAUTHENTICATED_BYTES and self._cutting is None:
                self._outer.pause(Pause.UNAUTHENTICATED)
                self._cutting = asyncio.get_running_loop().call_later(UNAUTHENTICATED_WAIT, self.abort)
        elif self._buffered is not None and not self._buffered.add(len(data)):
            self._outer.pause(Pause.MEMORY)
            self._waiting = self._waiting or asyncio.create_task(self._wait_for_memory(self._buffered))
        self._inner.write(data)
        if not self._dialled:
            self._dialled = True
            try:
                end = self._proxy.dial(self.name)
            except OSError:
                self.abort()
                return
            self._tasks.append(attach(lambda: self._inner, end, self.abort))

    def _send(self, data: bytes) -> None:
        """Forwards bytes of gRPC."""
        if self._buffered is not None:
            self._buffered.remove(len(data) // REPLIES)
        self._outer.write(data)

    def _end(self, error: Exception | None) -> None:
        """gRPC has ended the connection; a client that reads still gets the last bytes."""
        if error is not None:
            self._send(self._inner.read_rest())
        self._outer.close()
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(LAST_WRITE, self.abort)


class Pause(enum.Enum):
    """Why a side is not read from."""

    PEER = enum.auto()  # the other side's peer does not read
    MEMORY = enum.auto()  # there is no room for more bytes
    UNAUTHENTICATED = enum.auto()  # the peer has sent all that an unauthenticated one may send


class ProxySide(asyncio.Protocol):
    """One side of a proxied connection: while its peer does not read, the other side is not read from."""

    other: ProxySide

    def __init__(self, receive: Callable[[bytes], None], lose: Callable[[Exception | None], None]) -> None:
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
        self._lose(exc)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)
        else:
            self._early.append(data)

    def read_rest(self) -> bytes:
        """Returns what the peer sent before it ended the connection, if that was found out by a write that failed:
        asyncio then reads no more, and closes the socket after `connection_lost`. It is at most the socket's buffer."""
        pieces: list[bytes] = []
        if self.transport is not None:
            descriptor = self.transport.get_extra_info("socket").fileno()
            with contextlib.suppress(OSError):
                while piece := os.read(descriptor, READ):
                    pieces.append(piece)
        return b"".join(pieces)

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
