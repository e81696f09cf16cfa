"""Connects to an agent. A dialer returns a connected, non-blocking stream socket. It raises OSError when there is none
now (the link tries again) and LinkError when there never will be."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from k8e.link.errors import LinkLost, ProtocolViolation


class Dialer(Protocol):
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
