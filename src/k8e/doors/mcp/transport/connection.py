"""A TCP connection of a client: it counts for the connection limits, and its HTTP requests are answered one after the
other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import h11

from k8e.core.access.access import Payer
from k8e.core.model import REMOTE, Caller
from k8e.doors.connection_limits import ConnectionLimits, Peer
from k8e.doors.http.connection import HttpConnection
from k8e.doors.http.exchange import READ_SIZE, Exchange, Request
from k8e.doors.http.wire import Head

if TYPE_CHECKING:
    from k8e.doors.mcp.transport.http import HttpTransport

HEAD_SIZE: Final = 64 << 10
BUFFER: Final = 32 << 10  # bytes read ahead while no request reads; twice that at most


class PeerConnection(asyncio.StreamReaderProtocol):
    """Gives its place in the connection limits back when the connection is lost."""

    peer: Peer
    attaching: asyncio.Task[Any]

    def __init__(
        self,
        limits: ConnectionLimits,
        serve: Callable[[PeerConnection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(asyncio.StreamReader(BUFFER, loop), functools.partial(serve, self), loop)
        self._limits = limits
        self.transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()
        self.peer_address = self.own_address = ("", 0)  # which stays where the client has left already

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer_address = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.own_address = (transport.get_extra_info("sockname") or ("", 0))[:2]
        super().connection_made(transport)

    def eof_received(self) -> bool:
        """A client that sends no more has left: its connection is closed."""
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        # Of TCP there are also losses, such as a timeout, that are no ConnectionError.
        super().connection_lost(ConnectionResetError(str(exc)) if exc else None)
        self.gone.set()
        self.release()

    def authenticate(self, payer: Payer) -> bool:
        """False: the payer has too many connections."""
        return self._limits.authenticate(self.peer, payer)

    def deauthenticate(self) -> None:
        self._limits.note_request(self.peer)
        self._limits.deauthenticate(self.peer)

    def release(self) -> None:
        self._limits.disconnect(self.peer)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        else:
            self.attaching.cancel()
        self.release()


class McpConnection(HttpConnection):
    """The caller of each request is known when the endpoint has authenticated it."""

    def __init__(
        self,
        endpoint: HttpTransport,
        connection: PeerConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
    ) -> None:
        super().__init__(
            *(Caller(REMOTE), endpoint.memory, reader, writer),
            head_patience=patience,
            idle_patience=patience,
            head_size=HEAD_SIZE,
        )
        self._endpoint = endpoint
        self._connection = connection

    async def _handle(self, exchange: Exchange, head: Head) -> None:
        await self._endpoint.answer(head, exchange, self._connection)

    async def _answer(self, head: Head) -> None:
        """Reads the rest of a body that was refused: a connection that is closed before is reset, and the client may
        not read the answer."""
        await super()._answer(head)
        if self._wire.their_state is h11.SEND_BODY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._head_patience):
                    while await self._reader.read(READ_SIZE):
                        pass

    def _log(self, head: Head, status: int, seconds: float) -> None:
        """Tools write their own lines."""


@dataclass(slots=True)
class HttpCall:
    """One request, as authentication and the transports use it."""

    head: Head
    request: Request
    exchange: Exchange
    connection: PeerConnection
    body: bytes = b""  # once it is read

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def authorization(self) -> list[str]:
        return [value.decode("latin-1") for name, value in self.head.headers if name == b"authorization"]

    def header(self, name: bytes) -> str | None:
        value = self.request.headers.get(name)
        return None if value is None else value.decode("latin-1")
