"""Connections to servers inside a session, over HTTP: the request's body goes in, the answer's comes out."""

from __future__ import annotations

import asyncio

from k8e.core.contract import PortConnection, PortService
from k8e.doors.errors import invalid
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.routes import BYTES, SESSIONS, Route


class PortHandlers:
    def __init__(self, ports: PortService) -> None:
        self._ports = ports

    @property
    def routes(self) -> tuple[Route, ...]:
        return (Route("POST", (*SESSIONS, "*", "ports", "*"), self.connect, (BYTES,)),)

    async def connect(self, exchange: Exchange, request: Request) -> None:
        """The answer begins when the connection stands, and ends with what the server sends. One that breaks off has no
        end. The two directions end each for itself, as those of a socket do."""
        text = request.path[4]
        if not text.isascii() or not text.isdigit() or len(text) > 5:
            raise invalid("port", f"{text[:20]!r} is no port", hint="1 to 65535")
        connection = await self._ports.connect(exchange.caller, request.path[2], int(text))
        try:
            await exchange.start_pieces(BYTES)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send_in(exchange, connection))
                both.create_task(self._send_out(exchange, connection))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first says why the other direction was given up
        finally:
            await connection.close()

    async def _send_in(self, exchange: Exchange, connection: PortConnection) -> None:
        while (piece := await exchange.read_piece()) is not None:
            await exchange.allocation.add(len(piece), long_lived=True)
            await connection.write(piece)
            exchange.allocation.remove(len(piece))
        await connection.close_write()

    async def _send_out(self, exchange: Exchange, connection: PortConnection) -> None:
        while piece := await connection.read():
            await exchange.send_piece(piece)
        await exchange.end_frames()
