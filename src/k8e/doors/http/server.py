"""HTTP/1.1 + JSON on a unix socket (docs/http-api.md): the door of the command line.

When a client disconnects, the task of its connection is cancelled, and with it what the client waited for.
"""

from __future__ import annotations

import asyncio
import collections
import grp
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import h11

from k8e.core.access.access import local_caller
from k8e.core.contract import SandboxService
from k8e.core.errors import Fault
from k8e.core.log.daemon_log import format_event
from k8e.core.model import Caller
from k8e.delays import Delays
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.http.connection import IDLE_PATIENCE, HttpConnection, name_path
from k8e.doors.http.errors import HttpRefusal, describe
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.frames import FrameKind
from k8e.doors.http.routes import Handlers, Router
from k8e.doors.http.wire import Head
from k8e.doors.request_memory import RequestMemory
from k8e.profiles.text import to_json

BUFFER: Final = 32 << 10  # of what a client sends while no handler reads; twice that and one piece at most
HEAD_PATIENCE: Final = 10.0  # from a request's first byte to the end of its head
CONNECTIONS_PER_USER: Final = 1000  # so that one member of the group cannot lock out the others
FORBIDDEN: Final = 403
HOSTS: Final = (b"", b"localhost")
GROUP: Final = "k8e"  # whose members can connect
BACKLOG: Final = 1024

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
        self.idle = Delays(IDLE_PATIENCE)
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
                hint = f"close some: a user has at most {CONNECTIONS_PER_USER}"
                refusal = HttpRefusal(503, "too_many_connections", "this user has too many connections open", hint=hint)
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


class UnixConnection(HttpConnection):
    """A connection to the unix socket, whose caller the kernel names."""

    def __init__(
        self, server: HttpServer, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(caller, server.memory, reader, writer, head_patience=server.head_patience, idle=server.idle)
        self._server = server

    async def _handle(self, exchange: Exchange, head: Head) -> None:
        try:
            request = Request.of(head)
            refuse_web_pages(request)
            await self._server.router.answer(exchange, request)
        except HttpRefusal as refusal:
            if refusal.status == FORBIDDEN:
                call = f"{head.method.decode()} {name_path(head)}"
                self._server.service.turn_away(self._caller.label, call, refusal.code)
            raise

    async def _explain(self, exchange: Exchange, problem: Fault | HttpRefusal) -> None:
        await super()._explain(exchange, problem)
        if exchange.can_continue:
            await exchange.send_frame(FrameKind.ERROR, to_json(describe(problem)[1]))
            await exchange.end_frames()


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


def read_caller(client: socket.socket) -> Caller:
    """The kernel names the process and its user."""
    pid, uid, _ = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return local_caller(uid, pid)


def refuse_web_pages(request: Request) -> None:
    """A browser that a web page makes call the daemon names the page's origin or another host, and can send none of
    the content types that the routes take."""
    if b"origin" in request.headers or b"sec-fetch-site" in request.headers:
        raise HttpRefusal(403, "origin_refused", "web pages may not call this", hint="call it from a program")
    if request.headers.get(b"host", b"") not in HOSTS:
        raise HttpRefusal(403, "host_refused", "this is not the host you are looking for", hint="Host: localhost")


def bind_socket(path: Path) -> socket.socket:
    """Makes a listening socket that only its owner and the group k8e, where there is one, can connect to.

    It gets its name last, so that there is never a socket of that name with other permissions, or that does not listen.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        previous = os.umask(0o177)
        try:
            listener.bind(str(draft))
        finally:
            os.umask(previous)
        open_to_group(draft)
        listener.listen(BACKLOG)
        draft.replace(path)
    except OSError:
        listener.close()
        draft.unlink(missing_ok=True)
        raise
    return listener


def open_to_group(path: Path) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    except (KeyError, PermissionError):
        return  # no such group, or no right to use it: only the owner can connect
    path.chmod(0o660)
