"""An address on which agents are received, for as long as somebody holds it open."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller
from k8e.doors.mcp.reception import PATH, Reception
from k8e.doors.specs import invalid

BACKLOG: Final = 128
_PRIVILEGED: Final = 1024


def bind(address: str, caller: Caller) -> socket.socket:
    """`:8811` is 127.0.0.1. Only this machine is listened to, and only what the caller could listen on themselves."""
    host, colon, port = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    name = "127.0.0.1" if name == "localhost" else name
    hint = "such as :8811 or 127.0.0.1:8811"
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        raise invalid("http_addr", f"{address!r} is no address and port", hint=hint) from None
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise invalid("http_addr", f"{address!r} has no port", hint=hint)
    if not ip.is_loopback:
        raise Fault(
            Kind.DENIED,
            "mcp_loopback_only",
            "agents are received from this machine only",
            detail=f"{ip} can be reached from elsewhere, and what is said over HTTP can be read on the way",
            hint="Listen on 127.0.0.1, and let others come through ssh -L, or a proxy that knows them.",
            field="http_addr",
        )
    if 0 < int(port) < _PRIVILEGED and caller.uid != 0:
        raise Fault(
            Kind.DENIED,
            "port_privileged",
            f"port {port} is for root",
            hint="Choose one from 1024 on.",
            field="http_addr",
        )
    listener = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(ip), int(port)))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "Another program listens there, perhaps another k8e sandbox-mcp: choose another port."
        raise Fault(
            Kind.UNAVAILABLE, "address_unusable", f"{address} cannot be used", detail=str(error), hint=hint
        ) from error
    return listener


def name_url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the daemon's."""
        yield


class Listener:
    def __init__(self, reception: Reception, listener: socket.socket) -> None:
        self._reception = reception
        self._listener = listener
        self._over = asyncio.Event()

    def close(self) -> None:
        self._over.set()

    async def serve(self) -> None:
        """Until closed or cancelled; nobody is served any more when it returns."""
        server = QuietServer(
            uvicorn.Config(
                self._reception,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            await asyncio.shield(asyncio.create_task(self._end(server, serving)))

    async def _end(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        server.should_exit = True
        await asyncio.wait({serving})
        self._listener.close()  # not before: the loop still looks at it
        await self._reception.close()
