"""The gateway's port: connections are counted here, and handed on to gRPC through a unix socket, byte for byte.

gRPC takes every connection and waits two minutes for its handshake: a peer that opens enough of them has all
descriptors of the daemon. So the port is ours. A connection that says nothing never reaches gRPC; one that does is
known to gRPC by the name of our end of the unix socket, by which the calls on it find the connection again: where it
comes from, and that it is not a stranger's any more.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from k8e.core.access.access import Payer
from k8e.core.errors import Fault
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.addresses import name_source
from k8e.doors.connection_limits import ConnectionLimits, Peer
from k8e.doors.grpc.buffered_bytes import REPLIES, BufferedBytes, estimate_message
from k8e.doors.request_memory import RequestMemory

DESCRIPTORS: Final = 3  # for one connection: here, and both ends of the unix socket
STRANGERS_BYTES: Final = 256 << 10  # all that a stranger has to say
# After that nothing is read until the caller is known: a large message may come faster than its call is looked at. A
# stranger who stays one is cut off.
STRANGERS_WAIT: Final = 10.0
FAREWELL: Final = 10.0  # for a client to read what was said last
BACKLOG: Final = 512
_SCHEME: Final = "unix-abstract:"


class Reading(enum.Enum):
    """Whether a call waits for a message."""

    NOT = enum.auto()
    SOON = enum.auto()
    SOME_TIME = enum.auto()  # it may say nothing for hours


class Carried(Protocol):
    """A call, as far as it matters to its connection."""

    reading: Reading

    def give_up(self, problem: Fault) -> None: ...


class Proxy:
    def __init__(
        self, listener: socket.socket, inner: str, connection_limits: ConnectionLimits, memory: RequestMemory
    ) -> None:
        """`inner`: the path of the socket that gRPC listens on."""
        self.memory = memory
        self.connection_limits = connection_limits
        self._listener = listener
        self._inner = inner
        self._acceptor = Acceptor(listener, self._take)
        self._connections: dict[str, Connection] = {}

    def open(self) -> None:
        self._acceptor.open()

    def close(self) -> None:
        """Takes no more connections; those that there are stay until gRPC ends them."""
        self._acceptor.close()
        self._listener.close()

    def end(self) -> None:
        for connection in list(self._connections.values()):
            connection.abort()

    def find(self, peer: str) -> Connection | None:
        """By what gRPC calls the other end."""
        return self._connections.get(peer.removeprefix(_SCHEME))

    def _take(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        connection = Connection(self, client, f"k8e-{secrets.token_hex(8)}")
        peer = self.connection_limits.connect(name_source(address[0]), DESCRIPTORS, connection.abort)
        if peer is None:
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.peer = peer
        self._connections[connection.name] = connection
        connection.start()

    def forget(self, connection: Connection) -> None:
        if self._connections.pop(connection.name, None) is not None:
            self.connection_limits.disconnect(connection.peer)

    def dial(self, name: str) -> socket.socket:
        """To gRPC, under that name. OSError."""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind(f"\0{name}")
            inner.connect(self._inner)
        except OSError:
            inner.close()
            raise
        return inner


class Connection:
    """A client's connection and ours to gRPC, as one."""

    peer: Peer

    def __init__(self, proxy: Proxy, client: socket.socket, name: str) -> None:
        self.name = name
        self._proxy = proxy
        self._client = client
        self._outer = Half(self._hear, self.abort)
        self._inner = Half(self._tell, self._end)
        self._outer.other, self._inner.other = self._inner, self._outer
        self._heard = 0  # bytes, while it is a stranger's
        self._dialled = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._calls: set[Carried] = set()
        self._cargo: BufferedBytes | None = None  # of a known caller
        self._waiting: asyncio.Task[None] | None = None  # for room
        self._spent: asyncio.TimerHandle | None = None  # ends a stranger who has said too much
        self._ending: asyncio.TimerHandle | None = None

    @property
    def source(self) -> str:
        return self.peer.source

    def greet(self) -> None:
        self._proxy.connection_limits.note_request(self.peer)

    def admit(self, payer: Payer) -> bool:
        if self.peer.payer == payer:
            return True
        if not self._proxy.connection_limits.authenticate(self.peer, payer):
            return False
        if self._spent is not None:
            self._spent.cancel()
            self._spent = None
            self._outer.resume(Pause.STRANGER)
        self._unload()
        self._cargo = BufferedBytes(self._proxy.memory.allocate(payer))
        return True

    def distrust(self) -> None:
        if self.peer.payer is not None:  # what a stranger has said counts on, however many calls it is
            self._heard = 0
            self._unload()
            self._proxy.connection_limits.deauthenticate(self.peer)

    # Bytes of messages on their way

    @contextmanager
    def carry(self, call: Carried, head: int) -> Iterator[None]:
        """`head`: bytes of the call that are no message's."""
        self._calls.add(call)
        if self._cargo is not None:
            self._cargo.take_out(head)
        try:
            yield
        finally:
            self._calls.discard(call)
            if not self._calls and self._cargo is not None:
                self._cargo.clear()

    def hand_on(self, size: int) -> None:
        """A message was."""
        if self._cargo is not None:
            self._cargo.take_out(estimate_message(size))

    def _unload(self) -> None:
        if self._cargo is not None:
            self._cargo.clear()
            self._cargo = None

    def _tell(self, data: bytes) -> None:
        if self._cargo is not None:
            self._cargo.take_out(len(data) // REPLIES)
        self._outer.write(data)

    async def _wait_for_room(self, cargo: BufferedBytes) -> None:
        """Nothing is read meanwhile. Where that does not help, the calls have to go whose messages are on their way:
        those that wait for one, or else those that wait for one some time."""
        try:
            await cargo.wait()
        except Fault as fault:
            for reading in (Reading.SOON, Reading.SOME_TIME):
                if late := [call for call in self._calls if call.reading is reading]:
                    for call in late:
                        call.give_up(fault)
                    break
            cargo.clear()
        if cargo is not self._cargo:  # whose it was is not known any more
            cargo.clear()
        self._waiting = None
        self._outer.resume(Pause.ROOM)

    def start(self) -> None:
        self._tasks.append(attach(lambda: self._outer, self._client, self.abort))

    def _hear(self, data: bytes) -> None:
        """From the client. Its first word opens the way to gRPC."""
        if self.peer.payer is None:
            self._heard += len(data)
            if self._heard > STRANGERS_BYTES and self._spent is None:
                self._outer.pause(Pause.STRANGER)
                self._spent = asyncio.get_running_loop().call_later(STRANGERS_WAIT, self.abort)
        elif self._cargo is not None and not self._cargo.add(len(data)):
            self._outer.pause(Pause.ROOM)
            self._waiting = self._waiting or asyncio.create_task(self._wait_for_room(self._cargo))
        self._inner.write(data)
        if not self._dialled:
            self._dialled = True
            try:
                end = self._proxy.dial(self.name)
            except OSError:
                self.abort()
                return
            self._tasks.append(attach(lambda: self._inner, end, self.abort))

    def _end(self) -> None:
        """gRPC has: what it said last still gets to a client that reads."""
        self._outer.close()
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(FAREWELL, self.abort)

    def abort(self) -> None:
        for timer in (self._ending, self._spent):
            if timer is not None:
                timer.cancel()
        for task in (*self._tasks, *([self._waiting] if self._waiting else ())):
            task.cancel()
        self._unload()
        self._outer.abort()
        self._inner.abort()
        self._proxy.forget(self)


class Pause(enum.Enum):
    """Why an end is not read from."""

    PEER = enum.auto()  # the other end's peer does not read
    ROOM = enum.auto()  # there is no room for more bytes
    STRANGER = enum.auto()  # it has said all that a stranger has to say


class Half(asyncio.Protocol):
    """One end. While its peer does not read, the other end is not read from either."""

    other: Half

    def __init__(self, hear: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        self._hear = hear
        self._lose = lose
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # what is to be said once there is a connection
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
        self._hear(data)

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
