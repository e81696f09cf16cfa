"""Listens on an address for MCP over HTTP, with TLS beyond loopback, until the caller that asked for it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from typing import Any, Final

import h11

from k8e.core.access.access import require_scope
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import format_event
from k8e.core.model import Caller, Scope
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.addresses import bind_port, bracket, name_source
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.errors import invalid
from k8e.doors.mcp.authentication import PATH
from k8e.doors.mcp.certificates import TlsCertificate
from k8e.doors.mcp.transport.connection import McpConnection, PeerConnection
from k8e.doors.mcp.transport.http import HttpTransport

PATIENCE: Final = 10.0  # from a connection, an answer or a request's first byte to the end of the request's head
GRACE: Final = 1.0  # for requests under way when the server closes
_PRIVILEGED: Final = 1024

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

log = logging.getLogger("k8e.doors.mcp")


def read_address(address: str) -> tuple[IP, int]:
    """`:8811` is 127.0.0.1."""
    host, colon, port = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    name = "127.0.0.1" if name == "localhost" else name
    hint = "such as :8811, 127.0.0.1:8811 or 0.0.0.0:8811"
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        raise invalid("http_addr", f"{address!r} is no address and port", hint=hint) from None
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise invalid("http_addr", f"{address!r} has no port", hint=hint)
    return ip, int(port)


def bind(ip: IP, port: int, caller: Caller) -> socket.socket:
    """Binds what the caller could bind itself. Only an admin lets other machines in."""
    if not ip.is_loopback:
        require_scope(caller, Scope.ADMIN)
    if 0 < port < _PRIVILEGED and caller.uid != 0:
        hint = "Choose one from 1024 on."
        raise Fault(Kind.DENIED, "port_privileged", f"port {port} is for root", hint=hint, field="http_addr")
    try:
        return bind_port(str(ip), port)
    except OSError as error:
        hint = "Another program listens there, perhaps another k8e sandbox-mcp: choose another port."
        raise Fault(
            Kind.UNAVAILABLE, "address_unusable", f"{ip}:{port} cannot be used", detail=str(error), hint=hint
        ) from error


def name_url(listener: socket.socket, scheme: str) -> str:
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{bracket(host)}:{port}{PATH}"


class McpServer:
    def __init__(
        self,
        transport: HttpTransport,
        listener: socket.socket,
        certificate: TlsCertificate | None,
        limits: ConnectionLimits,
        patience: float = PATIENCE,
    ) -> None:
        """Without a certificate there is no TLS."""
        self._transport = transport
        self._listener = listener
        self._certificate = certificate
        self._limits = limits
        self._patience = patience
        self._attaching: set[asyncio.Task[Any]] = set()
        self._connections: set[McpConnection] = set()
        self._closing = asyncio.Event()

    def close(self) -> None:
        self._closing.set()

    def revoke(self, identity: str) -> None:
        self._transport.revoke(identity)

    async def serve(self) -> None:
        """Serves until closed or cancelled. When it returns, no request is under way."""
        context = self._certificate.make_context() if self._certificate else None
        acceptor = Acceptor(self._listener, lambda client, address: self._accept(context, client, address))
        try:
            acceptor.open()
            while not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._renewal_delay()):
                        await self._closing.wait()
                if self._certificate and context and self._renewal_delay() == 0:
                    self._certificate.renew(context)
        finally:
            acceptor.close()
            self._listener.close()
            await asyncio.shield(asyncio.create_task(self._end()))

    def _renewal_delay(self) -> float | None:
        if self._certificate is None or self._certificate.renew_at == float("inf"):
            return None
        return max(0.0, self._certificate.renew_at - time.time())

    def _accept(self, context: ssl.SSLContext | None, client: socket.socket, address: tuple[Any, ...]) -> None:
        connection = PeerConnection(self._limits, self._serve)
        peer = self._limits.connect(name_source(address[0]), 1, connection.abort)
        if peer is None:
            client.close()
            return
        connection.peer = peer
        task = attach(lambda: connection, client, connection.release, tls=context, patience=self._patience)
        connection.attaching = task
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _serve(self, peer: PeerConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing.is_set():
            writer.close()
            return
        connection = McpConnection(self._transport, peer, reader, writer, self._patience)
        self._connections.add(connection)
        try:
            await connection.serve()
        except asyncio.CancelledError:
            pass  # the server closes
        except (ConnectionError, h11.LocalProtocolError) as error:
            log.debug("%s", format_event("connection_ended", {"cause": repr(error)}))
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _end(self) -> None:
        self._closing.set()
        for task in self._attaching:
            task.cancel()
        for connection in self._connections:
            connection.retire()
        if tasks := [connection.task for connection in self._connections]:
            _, late = await asyncio.wait(tasks, timeout=GRACE)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=GRACE)
        await self._transport.close()
