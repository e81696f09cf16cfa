"""One client's connection over HTTP/1.1: its requests, one after the other."""

from __future__ import annotations

import abc
import asyncio
import logging
import select
import socket
import time
from typing import Final

import h11

from k8e.core.access.access import Payer
from k8e.core.errors import Fault
from k8e.core.log.daemon_log import format_event
from k8e.core.model import Caller
from k8e.delays import Delays
from k8e.doors.http.errors import HttpRefusal, describe, internal_error, malformed
from k8e.doors.http.exchange import READ_SIZE, Exchange
from k8e.doors.http.frames import BadFrame
from k8e.doors.http.wire import Event, Head, QuickHead, Wire
from k8e.doors.request_memory import RequestMemory

HEAD_SIZE: Final = 32 << 10
IDLE_PATIENCE: Final = 120.0  # between two requests

log = logging.getLogger("k8e.doors.http")


class HttpConnection(abc.ABC):
    """Reads the requests of a connection. The door that it belongs to handles them."""

    def __init__(
        self,
        caller: Caller,
        memory: RequestMemory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        head_patience: float,
        idle_patience: float = IDLE_PATIENCE,
        idle: Delays | None = None,
        head_size: int = HEAD_SIZE,
    ) -> None:
        """`idle`: the timers for `idle_patience`, of all connections that have the same."""
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[None] = task
        self._caller = caller
        self._memory = memory
        self._reader = reader
        self._writer = writer
        self._head_patience = head_patience
        self._idle_patience = idle_patience
        self._idle = idle or Delays(idle_patience)
        self._departure = Departure(writer)
        self._payer = Payer(caller.uid, "")
        self._wire = Wire(head_size)
        self._busy = False
        self._retired = False

    def retire(self) -> None:
        """Takes no further request; the one under way goes on."""
        self._retired = True
        if not self._busy:
            self.task.cancel()

    async def serve(self) -> None:
        while not self._retired:
            try:
                head = await self._read_head()
            except TimeoutError:
                return
            except h11.RemoteProtocolError as error:
                await self.refuse(explain_malformed(error))
                return
            if head is None or self._departure.is_gone():
                return
            self._busy = True
            await self._answer(head)
            self._busy = False
            if self._wire.our_state is not h11.DONE or self._wire.their_state is not h11.DONE:
                return
            self._wire.start_next_cycle()

    async def _read_head(self) -> Head | None:
        """Reads the next request; None when the client has no more."""
        if self._wire.fresh:
            # Most requests arrive as a whole. A client that is silent for too long is taken for one that has no more.
            waiting = self._idle.add(self._reader.feed_eof)
            try:
                data = await self._reader.read(READ_SIZE)
            finally:
                self._idle.remove(waiting)
            if not data:
                return None
            self._wire.receive_data(data)
            event = self._wire.next_event()
            if isinstance(event, QuickHead):
                check_length(event)
                return event
            return await self._read_slow_head(event, started=True)
        return await self._read_slow_head(self._wire.next_event(), started=False)

    async def _read_slow_head(self, event: Event, *, started: bool) -> Head | None:
        limited = False
        async with asyncio.timeout(self._idle_patience) as patience:
            while True:
                if isinstance(event, QuickHead | h11.Request):
                    check_length(event)
                    return event
                if event is not h11.NEED_DATA:
                    return None
                if started and not limited:
                    limited = True
                    patience.reschedule(asyncio.get_running_loop().time() + self._head_patience)
                data = await self._reader.read(READ_SIZE)
                started = started or bool(data)
                self._wire.receive_data(data)
                event = self._wire.next_event()

    async def _answer(self, head: Head) -> None:
        began = time.monotonic()
        exchange = self._begin()
        try:
            await self._handle(exchange, head)
        except (Fault, HttpRefusal) as problem:
            await self._explain(exchange, problem)
        except (h11.RemoteProtocolError, BadFrame) as error:
            await self._explain(exchange, explain_malformed(error))
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s", format_event("request_failed", {"uid": self._caller.uid}))
            await self._explain(exchange, internal_error())
        finally:
            exchange.allocation.free()
            self._log(head, exchange.status, time.monotonic() - began)

    def _begin(self) -> Exchange:
        allocation = self._memory.allocate(self._payer)
        return Exchange(self._caller, self._wire, self._reader, self._writer, allocation)

    @abc.abstractmethod
    async def _handle(self, exchange: Exchange, head: Head) -> None: ...

    async def _explain(self, exchange: Exchange, problem: Fault | HttpRefusal) -> None:
        if not exchange.status:
            await exchange.send_json(*describe(problem))

    def _log(self, head: Head, status: int, seconds: float) -> None:
        if log.isEnabledFor(logging.INFO):
            fields = {"method": head.method.decode(), "path": name_path(head), "status": status}
            log.info("%s", format_event("request", {**fields, "uid": self._caller.uid, "seconds": seconds}))

    async def refuse(self, refusal: HttpRefusal) -> None:
        if self._wire.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._explain(self._begin(), refusal)


class Departure:
    """Tells whether a client has left already. After a pause of the loop the request is read before the disconnect is
    noticed, and the client was told that nothing was done."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._client: socket.socket = writer.get_extra_info("socket")
        self._poll: select.poll | None = None

    def is_gone(self) -> bool:
        if self._client.fileno() < 0:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._client.fileno(), 0)
        return bool(self._poll.poll(0))


def check_length(head: Head) -> None:
    """Refuses two lengths: a proxy before the daemon may believe the other one, and take a part of this body for
    another client's request."""
    if len([name for name, _ in head.headers if name in (b"content-length", b"transfer-encoding")]) > 1:
        raise h11.RemoteProtocolError("a body has one length: Content-Length or Transfer-Encoding", 400)


def name_path(head: Head) -> str:
    """Without the query, because names of files do not belong into the log."""
    return head.target.partition(b"?")[0].decode("ascii", "replace")


def explain_malformed(error: Exception) -> HttpRefusal:
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    return malformed("the request is malformed", str(error), status)
