"""Connections to an address on which agents are received: strangers' until a known caller asks for something.

Who has not asked anything yet is not waited for long; how many there may be is counted for all ports together
(connection_limits.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from k8e.core.access.access import Payer
from k8e.doors.connection_limits import ConnectionLimits, Peer

PATIENCE: Final = 10.0  # from a connection, or a request's first byte, to the end of its head
CONNECTION: Final = "k8e.connection"  # under which a request finds its own


class Connection:
    """Whose a connection is, and how it is ended."""

    peer: Peer

    def __init__(self, connection_limits: ConnectionLimits) -> None:
        self._connection_limits = connection_limits
        self.arriving: asyncio.Task[Any] | None = None
        self.protocol: Doorkeeper | None = None

    @classmethod
    def of(cls, scope: Scope) -> Connection | None:
        """The one that a request came on."""
        found = scope.get("state", {}).get(CONNECTION)
        return found if isinstance(found, cls) else None

    def admit(self, payer: Payer) -> bool:
        return self._connection_limits.authenticate(self.peer, payer)

    def distrust(self) -> None:
        self._connection_limits.note_request(self.peer)
        self._connection_limits.deauthenticate(self.peer)

    def leave(self) -> None:
        self._connection_limits.disconnect(self.peer)

    def close(self) -> None:
        if self.protocol is not None and self.protocol.is_open:
            self.protocol.transport.abort()
        elif self.arriving is not None:
            self.arriving.cancel()
        self.leave()


class Doorkeeper(H11Protocol):
    patience = PATIENCE
    is_open = False
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_open = True
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._relax()
        elif self._waiting is None:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)
        connection = self.app_state.get(CONNECTION)
        if isinstance(connection, Connection):
            connection.leave()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # which it is, whatever is written there
        return cycle is not None and not cycle.response_complete

    def _expect(self) -> None:
        self._waiting = self.loop.call_later(self.patience, self._give_up)

    def _relax(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_answering:
            self.transport.abort()
