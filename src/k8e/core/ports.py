"""Connections to servers inside a session. Each begins on the machine, at the caller's wish, and goes through the link
to the sandbox's own loopback: the sandbox's network has no part in it, and a program inside can begin none."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from typing import Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.model import Caller
from k8e.core.parts import Parts
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Sessions
from k8e.core.translation import translated
from k8e.link.errors import AgentError, BrokenInput, Code
from k8e.link.model import Connection

MOST: Final = 64  # connections to one session at once: each takes memory of its agent
_ACCEPTED: Final = 10.0  # within which a server takes a connection


class Ports:
    """Implements `contract.PortService`."""

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions
        self._open: dict[str, set[OpenPort]] = {}  # by sandbox

    @call("connect_port")
    async def connect(self, caller: Caller, session_id: str, port: int) -> OpenPort:
        checks.check_number("port", port, 1, 65535)
        opened = await self._sessions.open(caller, session_id)
        live = opened.live
        connection = OpenPort(port)
        with ExitStack() as use:
            self._add(live, connection)
            use.callback(self._forget, live, connection)
            use.enter_context(live.in_use())
            await self._parts.audit.record("port_connected", caller=caller.label, port=port, **live.identity)
            with self._sessions.using(live, f"connecting to port {port}"):
                try:
                    async with asyncio.timeout(_ACCEPTED):
                        connected = await opened.sandbox.connect(port=port)
                    connection.begin(connected, use)
                except TimeoutError:
                    self._sessions.doubt(live)  # it may be the sandbox that is silent
                    raise _silent(port) from None
                except AgentError as error:
                    if error.code is Code.REFUSED:
                        raise _closed(port) from error
                    raise
        return connection

    async def close(self) -> None:
        """Ends all of them, so that the doors need not wait for their clients."""
        for connections in list(self._open.values()):
            for connection in list(connections):
                await connection.close()

    def _add(self, live: Live, connection: OpenPort) -> None:
        connections = self._open.setdefault(live.sandbox, set())
        if len(connections) >= MOST:
            raise Fault(
                Kind.EXHAUSTED,
                "too_many_connections",
                f"there are {MOST} connections to ports of this session already",
                hint="Close some, then try again.",
                retry_after=1.0,
            )
        connections.add(connection)

    def _forget(self, live: Live, connection: OpenPort) -> None:
        self._open[live.sandbox].discard(connection)
        if not self._open[live.sandbox]:
            del self._open[live.sandbox]


class OpenPort:
    """Implements `contract.PortConnection`. Ends with its session."""

    def __init__(self, port: int) -> None:
        self._subject = f"port {port}"
        self._connection: Connection | None = None
        self._use = ExitStack()

    def begin(self, connection: Connection, use: ExitStack) -> None:
        """It stands. `use` is closed with it."""
        self._connection, self._use = connection, use.pop_all()

    async def read(self) -> bytes:
        with translated(f"reading from {self._subject}"):
            return await self._stream.read()

    async def write(self, data: bytes) -> None:
        # A server that reads no more may still send.
        with translated(f"writing to {self._subject}"), suppress(BrokenInput):
            await self._stream.write(data)

    async def close_write(self) -> None:
        with translated(f"writing to {self._subject}"):
            await self._stream.close_write()

    async def close(self) -> None:
        self._use.close()
        if self._connection is not None:
            await self._connection.close()

    @property
    def _stream(self) -> Connection:
        assert self._connection is not None, "it has not begun"
        return self._connection


def _closed(port: int) -> Fault:
    hint = "Start the server first; it listens on 127.0.0.1, ::1 or all addresses of the sandbox."
    return Fault(Kind.UNAVAILABLE, "port_closed", f"no program in the sandbox listens on port {port}", hint=hint)


def _silent(port: int) -> Fault:
    error = f"the server on port {port} did not take the connection within {_ACCEPTED:g} s"
    hint = "It listens and accepts no more connections: look at what it does, or start it again."
    return Fault(Kind.UNAVAILABLE, "port_silent", error, hint=hint)
