"""HTTP/1.1 + JSON on a unix socket (docs/http-api.md): the door of the command line.

When a client disconnects, the task of its connection is cancelled, and with it what the client waited for.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Iterable
from typing import Any, Final

import h11

from k8e.core.contract import SandboxService
from k8e.core.log.daemon_log import format_event
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.http.authentication import read_caller
from k8e.doors.http.connection import UnixConnection
from k8e.doors.http.disconnects import Disconnects
from k8e.doors.http.errors import HttpRefusal
from k8e.doors.http.routes import Handlers, Router
from k8e.doors.request_memory import RequestMemory

BUFFER: Final = 32 << 10  # of what a client sends while no handler reads; twice that and one piece at most
HEAD_PATIENCE: Final = 10.0  # from a request's first byte to the end of its head
CONNECTIONS_PER_USER: Final = 1000  # so that one member of the group cannot lock out the others

log = logging.getLogger("k8e.doors.http")


class HttpServer:
    """Serves a listening socket until closed."""

    def __init__(
        self,
        service: SandboxService,
        handlers: Iterable[Handlers],
        *,
        memory: RequestMemory | None = None,
        head_patience: float = HEAD_PATIENCE,
    ) -> None:
        self.service = service
        self.router = Router(handlers)
        self.memory = memory or RequestMemory()
        self.head_patience = head_patience
        self._disconnects = Disconnects()
        self._acceptor: Acceptor | None = None
        self._listener: socket.socket | None = None
        self._connecting: set[asyncio.Task[Any]] = set()
        self._connections: set[UnixConnection] = set()
        self._users: collections.Counter[int] = collections.Counter()

    async def open(self, listener: socket.socket) -> None:
        self._disconnects.open()
        self._listener = listener
        self._acceptor = Acceptor(listener, self._take)
        self._acceptor.open()

    async def close(self, grace: float) -> int:
        """Takes no more requests and waits for those under way. Returns how many did not finish; they go on."""
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            self._listener.close()
            self._acceptor = None
        for connection in self._connections:
            connection.retire()
        if tasks := [connection.task for connection in self._connections]:
            await asyncio.wait(tasks, timeout=grace)
        if not self._connections:
            self._disconnects.close()
        return len(self._connections)

    def _take(self, client: socket.socket, _: object) -> None:
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=BUFFER, loop=loop), self._serve, loop=loop)
        task = attach(lambda: protocol, client, lambda: None)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client: socket.socket = writer.get_extra_info("socket")
        if client.fileno() < 0:
            return  # the client has left already
        caller = read_caller(client)
        task = asyncio.current_task()
        assert task is not None
        try:
            watched = self._disconnects.watch(client.fileno(), task.cancel)
        except OSError:  # no descriptor left: the client sees the end of the connection
            writer.close()
            return
        connection = UnixConnection(self, caller, reader, writer)
        self._connections.add(connection)
        self._users[caller.uid] += 1
        try:
            if self._users[caller.uid] > CONNECTIONS_PER_USER:
                refusal = HttpRefusal(503, "too_many_connections", "this user has too many connections open")
                await connection.refuse(refusal)
            else:
                await connection.serve()
        except asyncio.CancelledError:
            pass  # the client has left, or the server closes
        except (ConnectionError, h11.LocalProtocolError) as error:
            log.debug("%s", format_event("connection_ended", {"uid": caller.uid, "cause": repr(error)}))
        finally:
            self._disconnects.forget(watched)
            self._connections.discard(connection)
            self._users[caller.uid] -= 1
            if not self._users[caller.uid]:
                del self._users[caller.uid]
            writer.close()
