"""Connections of people who have not asked anything yet. Nobody knows them, so they are few, and not for long."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

PATIENCE: Final = 10.0  # from a connection, or a request's first byte, to the end of its head
MOST: Final = 2000  # connections of one address


class Doorkeeper(H11Protocol):
    patience = PATIENCE
    most = MOST
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
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
