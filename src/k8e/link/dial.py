"""Connects to an agent. A dialer returns a connected, non-blocking stream socket, or one with the ciphers to use over
it (noise/). It raises OSError when there is none now, and LinkError; only a ProtocolViolation says that there never
will be one."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import stat
from collections import deque
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Protocol

from k8e.link.errors import LinkLost, ProtocolViolation

_GREETING_DEADLINE = 3.0  # seconds
PORT_TOKEN = 16  # bytes


class Sealed(Protocol):
    """A connected socket whose bytes are sealed on their way."""

    @property
    def socket(self) -> socket.socket: ...

    def carry(self, inner: asyncio.BufferedProtocol) -> asyncio.BaseProtocol:
        """Returns the protocol for the socket; `inner` reads and writes as over a plain one."""
        ...


class Dialer(Protocol):
    def __call__(self) -> Awaitable[socket.socket | Sealed]: ...


class PlainDialer(Protocol):
    """A dialer whose bytes are not sealed."""

    def __call__(self) -> Awaitable[socket.socket]: ...


class UnixDialer:
    """A socket in a directory into which the sandbox can write: its name there is not followed if it is a symlink, and
    what was looked at is what is connected to. The directory's own path is trusted."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Path(path).parent
        self._name = Path(path).name

    async def __call__(self) -> socket.socket:
        # Nothing here waits: O_PATH opens neither devices nor FIFOs, lookups are on a local filesystem, and a unix
        # socket connects at once or says EAGAIN when its backlog is full. (loop.sock_connect would take that EAGAIN for
        # "in progress", find the socket writable and call it connected.)
        directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.open(self._name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            if not stat.S_ISSOCK(os.fstat(found).st_mode):
                raise ProtocolViolation(f"{self._name} is not a socket")
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                connection.connect(f"/proc/self/fd/{found}")
            except OSError:
                connection.close()
                raise
            return connection
        finally:
            os.close(found)


class PortDialer:
    """One of the ports of a virtual machine's console, each a socket NUMBER.sock in a directory of its VMM. A port that
    is free repeats the greeting and the token that it is sent; what comes before is an older connection's. One that has
    a connection, or has not noticed the end of its last one, does not, and the next is tried. The deadline of the link
    ends that."""

    def __init__(self, folder: str | os.PathLike[str], ports: Sequence[int], greeting: bytes) -> None:
        self._folder = Path(folder)
        self._ports = deque(ports)
        self._ports.rotate(secrets.randbelow(len(ports)))  # a daemon that was killed had one of them
        self._greeting = greeting

    async def __call__(self) -> socket.socket:
        self._ports.rotate(-1)
        connection = await UnixDialer(self._folder / f"{self._ports[0]}.sock")()
        try:
            async with asyncio.timeout(_GREETING_DEADLINE):
                await self._exchange_greetings(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _exchange_greetings(self, connection: socket.socket) -> None:
        loop, token = asyncio.get_running_loop(), secrets.token_bytes(PORT_TOKEN)
        wanted, heard = self._greeting + token, b""
        await loop.sock_sendall(connection, wanted)
        while not heard.endswith(wanted):  # an agent says nothing before it is asked, so nothing comes after it
            more = await loop.sock_recv(connection, 65536)
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "the port was closed")
            heard = heard[-len(wanted) :] + more


class SocketDialer:
    """A socket that is connected already. It can be had once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection

    async def __call__(self) -> socket.socket:
        if self._connection is None:
            raise LinkLost("the one connection that there was is gone")
        connection, self._connection = self._connection, None
        connection.setblocking(False)
        return connection
