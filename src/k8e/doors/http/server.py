"""HTTP/1.1 + JSON on a unix socket (docs/http-api.md): the door of the command line.

Who calls is known from the kernel (SO_PEERCRED). Web pages are kept out: no Origin, no foreign Host, no content type
that a form could send. When a client goes away, its connection's task is cancelled, and with it what it waited for.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import select
import socket
import struct
import time
from typing import Any

import h11

from k8e.core.access.access import find_payer
from k8e.core.errors import Fault
from k8e.core.log.journal import format_event
from k8e.core.model import Caller
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.http.answers import encode
from k8e.doors.http.disconnects import Disconnects
from k8e.doors.http.errors import HttpRefusal, describe, internal_error
from k8e.doors.http.exchange import READ_SIZE, Exchange, Request
from k8e.doors.http.frames import BadFrame, FrameKind
from k8e.doors.http.routes import Routes
from k8e.doors.request_memory import RequestMemory

HOSTS = (b"", b"localhost")
FORBIDDEN = 403
HEAD_SIZE = 32 << 10
BUFFER = 32 << 10  # of what a connection sends while no handler reads; twice that and one piece at most
HEAD_PATIENCE = 10.0  # from a request's first byte to the end of its head
IDLE_PATIENCE = 120.0  # between two requests
CONNECTIONS_PER_USER = 1000  # so that one member of the group cannot lock out the others

log = logging.getLogger(__name__)


class HttpServer:
    """Serves a listening socket until closed."""

    def __init__(
        self, routes: Routes, *, memory: RequestMemory | None = None, head_patience: float = HEAD_PATIENCE
    ) -> None:
        self._memory = memory or RequestMemory()
        self._routes = routes
        self._head_patience = head_patience
        self._departures = Disconnects()
        self._acceptor: Acceptor | None = None
        self._listener: socket.socket | None = None
        self._connecting: set[asyncio.Task[Any]] = set()
        self._connections: set[Connection] = set()
        self._users: collections.Counter[int] = collections.Counter()

    async def open(self, listener: socket.socket) -> None:
        self._departures.open()
        self._listener = listener
        self._acceptor = Acceptor(listener, self._take)
        self._acceptor.open()

    async def close(self, grace: float) -> int:
        """Takes no more requests and lets those under way finish. How many did not is told; they are not touched."""
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            self._listener.close()
            self._acceptor = None
        for connection in self._connections:
            connection.retire()
        if tasks := [connection.task for connection in self._connections]:
            await asyncio.wait(tasks, timeout=grace)
        if not self._connections:
            self._departures.close()
        return len(self._connections)

    def _take(self, client: socket.socket, _: object) -> None:
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=BUFFER, loop=loop), self._accept, loop=loop)
        task = attach(lambda: protocol, client, lambda: None)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client: socket.socket = writer.get_extra_info("socket")
        if client.fileno() < 0:
            return  # gone before we looked
        caller = read_caller(client)
        task = asyncio.current_task()
        assert task is not None
        try:
            watched = self._departures.watch(client.fileno(), task.cancel)
        except OSError:  # no descriptor left: the client hears it by the end of the connection
            writer.close()
            return
        connection = Connection(self._routes, caller, reader, writer, task, self._head_patience, self._memory)
        self._connections.add(connection)
        self._users[caller.uid] += 1
        try:
            await connection.serve(crowded=self._users[caller.uid] > CONNECTIONS_PER_USER)
        except asyncio.CancelledError:
            pass  # the client is gone, or the door closes
        except (ConnectionError, h11.LocalProtocolError) as error:
            log.debug("%s", format_event("connection_ended", {"uid": caller.uid, "cause": repr(error)}))
        finally:
            self._departures.forget(watched)
            self._connections.discard(connection)
            self._users[caller.uid] -= 1
            if not self._users[caller.uid]:
                del self._users[caller.uid]
            writer.close()


class Connection:
    """One client's requests, one after the other."""

    def __init__(
        self,
        routes: Routes,
        caller: Caller,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None],
        head_patience: float,
        memory: RequestMemory,
    ) -> None:
        self._memory = memory
        self.task = task
        self._routes = routes
        self._caller = caller
        self._reader = reader
        self._writer = writer
        self._head_patience = head_patience
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_SIZE)
        self._busy = False
        self._retired = False

    def retire(self) -> None:
        """No further request; the one under way goes on."""
        self._retired = True
        if not self._busy:
            self.task.cancel()

    async def serve(self, *, crowded: bool) -> None:
        if crowded:
            return await self._refuse(
                HttpRefusal(503, "too_many_connections", "this user has too many connections open")
            )
        while not self._retired:
            try:
                head = await self._read_head()
            except TimeoutError:
                return None
            except h11.RemoteProtocolError as error:
                return await self._refuse(malformed(error))
            if head is None or is_gone(self._writer):
                return None
            self._busy = True
            await self._answer(head)
            self._busy = False
            if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
                return None
            self._protocol.start_next_cycle()
        return None

    async def _read_head(self) -> h11.Request | None:
        """The next request; None when the client has no more."""
        started = False
        async with asyncio.timeout(IDLE_PATIENCE) as patience:
            while True:
                event = self._protocol.next_event()
                if isinstance(event, h11.Request):
                    check_length(event)
                    return event
                if event is not h11.NEED_DATA:
                    return None
                data = await self._reader.read(READ_SIZE)
                if data and not started:
                    started = True
                    patience.reschedule(asyncio.get_running_loop().time() + self._head_patience)
                self._protocol.receive_data(data)

    async def _answer(self, head: h11.Request) -> None:
        begun = time.monotonic()
        exchange = self._begin()
        try:
            request = Request.of(head)
            refuse_web_pages(request)
            await self._routes.answer(exchange, request)
        except (Fault, HttpRefusal) as problem:
            if isinstance(problem, HttpRefusal) and problem.status == FORBIDDEN:
                self._routes.turn_away(self._caller, f"{head.method.decode()} {name_path(head)}", problem)
            await self._explain(exchange, problem)
        except (h11.RemoteProtocolError, BadFrame) as error:
            await self._explain(exchange, malformed(error))
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s", format_event("request_failed", {"uid": self._caller.uid}))
            await self._explain(exchange, internal_error())
        finally:
            exchange.load.free()
            self._note(head, exchange.status, time.monotonic() - begun)

    def _begin(self) -> Exchange:
        load = self._memory.allocate(find_payer(self._caller.uid, ""))
        return Exchange(self._caller, self._protocol, self._reader, self._writer, load)

    def _note(self, head: h11.Request, status: int, seconds: float) -> None:
        if log.isEnabledFor(logging.INFO):
            fields = {"method": head.method.decode(), "path": name_path(head), "status": status}
            log.info("%s", format_event("request", {**fields, "uid": self._caller.uid, "seconds": seconds}))

    async def _explain(self, exchange: Exchange, problem: Fault | HttpRefusal) -> None:
        status, body = describe(problem)
        if not exchange.status:
            await exchange.send_json(status, body)
        elif exchange.can_continue:
            await exchange.send_frame(FrameKind.ERROR, encode(body))
            await exchange.end_frames()

    async def _refuse(self, refusal: HttpRefusal) -> None:
        if self._protocol.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._explain(self._begin(), refusal)


def is_gone(writer: asyncio.StreamWriter) -> bool:
    """Whether the client has left already. A loop that did not turn for a while may hear of that only after it has read
    the request; the client was told that nothing was done."""
    client: socket.socket = writer.get_extra_info("socket")
    if client.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(client.fileno(), 0)
    return bool(poll.poll(0))


def read_caller(client: socket.socket) -> Caller:
    pid, uid, _ = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Caller(uid, pid=pid)


def refuse_web_pages(request: Request) -> None:
    """A browser that was talked into calling us gives itself away, or cannot send what we ask for."""
    if b"origin" in request.headers or b"sec-fetch-site" in request.headers:
        raise HttpRefusal(403, "origin_refused", "web pages may not call this", hint="call it from a program")
    if request.headers.get(b"host", b"") not in HOSTS:
        raise HttpRefusal(403, "host_refused", "this is not the host you are looking for", hint="Host: localhost")


def check_length(head: h11.Request) -> None:
    """Said twice, it is said differently: a proxy before us that believes the other one takes part of this request for
    the next, which may be somebody else's."""
    if len([name for name, _ in head.headers if name in (b"content-length", b"transfer-encoding")]) > 1:
        raise h11.RemoteProtocolError("a body has one length: Content-Length or Transfer-Encoding", 400)


def name_path(head: h11.Request) -> str:
    """Without the query: paths of files are nobody's business."""
    return head.target.partition(b"?")[0].decode("ascii", "replace")


def malformed(error: Exception) -> HttpRefusal:
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    return HttpRefusal(status, "bad_request", "the request is malformed", detail=str(error))
