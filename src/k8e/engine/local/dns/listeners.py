"""The sockets on which one sandbox sends its queries: UDP and TCP on one address. Nothing here parses a query.

Sockets are read by hand and not by transports, because a transport reads whatever arrives: here, reading stops when
the sandbox has used up its allowance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from ipaddress import IPv6Address

from k8e.engine.local.dns.queries import MAX_QUERY
from k8e.engine.local.dns.rate_limits import MAX_CONNECTIONS, Allowance
from k8e.policy import Address

PAUSE = 0.05  # seconds until a sandbox that has used up its allowance is read from again
AT_A_TIME = 8  # queries read from one socket before the others have their turn
PATIENCE = 5.0  # seconds for a whole query to arrive, and for an answer to be sent
MAX_LIFE = 60.0  # of a connection
MAX_QUERIES = 100  # on a connection
RECEIVE_BUFFER = 64 << 10

# Not in Python's socket module. An address may be bound before it is there.
IP_FREEBIND = 15
IPV6_FREEBIND = 78

# The query, whether it came over TCP; the reply, empty: none.
Answer = Callable[[bytes, bool], Awaitable[bytes]]

log = logging.getLogger(__name__)


def open_sockets(
    address: Address, port: int, device: str = "", redirected_port: int | None = None
) -> list[socket.socket]:
    """UDP and TCP, bound and listening, and UDP on another port if one is given. With a device, packets that come in on
    another device do not reach them; nor do those of processes of this machine, which come in on loopback whatever
    their address. OSError."""
    with contextlib.ExitStack() as undo:
        datagrams = undo.enter_context(_bind(address, port, socket.SOCK_DGRAM, device))
        streams = undo.enter_context(_bind(address, datagrams.getsockname()[1], socket.SOCK_STREAM, device))
        streams.listen(MAX_CONNECTIONS)
        opened = [datagrams, streams]
        if redirected_port is not None:
            opened.append(undo.enter_context(_bind(address, redirected_port, socket.SOCK_DGRAM, device)))
        undo.pop_all()
    return opened


def _bind(address: Address, port: int, kind: socket.SocketKind, device: str) -> socket.socket:
    six = isinstance(address, IPv6Address)
    sock = socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind | socket.SOCK_NONBLOCK)
    try:
        if device:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        if kind == socket.SOCK_STREAM:
            # Connections of a daemon that was killed linger; without this the next one could not listen for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not isinstance(address, IPv6Address):
            sock.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            sock.bind((str(address), port))
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
            zone = address.scope_id
            sock.bind((str(address).partition("%")[0], port, 0, socket.if_nametoindex(zone) if zone else 0))
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """The sockets of one address, from construction to `stop`."""

    def __init__(self, sockets: Sequence[socket.socket], allowance: Allowance, answer: Answer) -> None:
        self._sockets = sockets
        self._allowance = allowance
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        for sock in sockets:
            read = self._read_datagrams if sock.type == socket.SOCK_DGRAM else self._accept
            self._loop.add_reader(sock, read, sock)

    def stop(self) -> None:
        """Its address is free when this returns."""
        for pause in self._pauses.values():
            pause.cancel()
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """After `stop`: waits for the queries that were under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None], afterwards: Callable[[], None]) -> None:
        """`afterwards` happens even to a task that is cancelled before it begins."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            afterwards()

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _pause(self, sock: socket.socket, again: Callable[[socket.socket], None]) -> None:
        def resume() -> None:
            del self._pauses[sock]
            self._loop.add_reader(sock, again, sock)

        self._loop.remove_reader(sock)
        self._pauses[sock] = self._loop.call_later(PAUSE, resume)

    def _read_datagrams(self, sock: socket.socket) -> None:
        for _ in range(AT_A_TIME):
            if not self._allowance.may_ask(self._loop.time()):
                return self._pause(sock, self._read_datagrams)
            try:
                wire, sender = sock.recvfrom(MAX_QUERY + 1)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                log.warning("names: cannot read queries: %s", error)
                return self._pause(sock, self._read_datagrams)
            self._allowance.begin()
            self._spawn(self._answer_datagram(sock, wire, sender), self._allowance.end)
        return None

    async def _answer_datagram(self, sock: socket.socket, wire: bytes, sender: tuple[object, ...]) -> None:
        if reply := await self._answer(wire, False):
            # An answer that cannot be sent is lost, as on any network; the client asks again.
            with contextlib.suppress(OSError):
                sock.sendto(reply, sender)

    def _accept(self, sock: socket.socket) -> None:
        if not self._allowance.may_connect(self._loop.time()):
            return self._pause(sock, self._accept)
        try:
            connection, _ = sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        except OSError as error:
            log.warning("names: cannot accept a connection: %s", error)
            return self._pause(sock, self._accept)
        connection.setblocking(False)
        self._allowance.connect()

        def hang_up() -> None:
            connection.close()
            self._allowance.disconnect()

        self._spawn(self._serve_connection(connection), hang_up)
        return None

    async def _serve_connection(self, connection: socket.socket) -> None:
        """One query after the other: a client with many on one connection waits for its own."""
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            async with asyncio.timeout(MAX_LIFE):
                for _ in range(MAX_QUERIES):
                    await self._serve_query(connection)

    async def _serve_query(self, connection: socket.socket) -> None:
        async with asyncio.timeout(PATIENCE):
            (length,) = struct.unpack("!H", await self._read_exactly(connection, 2))
            if length > MAX_QUERY:
                raise EOFError
            wire = await self._read_exactly(connection, length)
        # No event to wait for: the allowance grows with time, or when another query ends.
        while not self._allowance.may_ask(self._loop.time()):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE)
        self._allowance.begin()
        try:
            reply = await self._answer(wire, True)
        finally:
            self._allowance.end()
        if not reply:
            raise EOFError
        async with asyncio.timeout(PATIENCE):
            await self._loop.sock_sendall(connection, struct.pack("!H", len(reply)) + reply)

    async def _read_exactly(self, connection: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = await self._loop.sock_recv(connection, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data
