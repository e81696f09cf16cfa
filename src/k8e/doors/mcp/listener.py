"""An address on which agents are received, for as long as somebody holds it open."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from k8e.core.access.access import require_scope
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, Scope
from k8e.doors.acceptor import Acceptor, attach
from k8e.doors.addresses import bracket, name_source
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.errors import invalid
from k8e.doors.mcp.certificates import Certificates
from k8e.doors.mcp.doorkeeper import CONNECTION, PATIENCE, Connection, Doorkeeper
from k8e.doors.mcp.entrance import PATH
from k8e.doors.mcp.reception import Reception

BACKLOG: Final = 128
_PRIVILEGED: Final = 1024


IP = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    """Only what the caller could listen on themselves; and who lets other machines in has to be root."""
    if not ip.is_loopback:
        require_scope(caller, Scope.ADMIN)
    if 0 < port < _PRIVILEGED and caller.uid != 0:
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
        listener.bind((str(ip), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "Another program listens there, perhaps another k8e sandbox-mcp: choose another port."
        raise Fault(
            Kind.UNAVAILABLE, "address_unusable", f"{ip}:{port} cannot be used", detail=str(error), hint=hint
        ) from error
    return listener


def name_url(listener: socket.socket, scheme: str) -> str:
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{bracket(host)}:{port}{PATH}"


class QuietServer(uvicorn.Server):
    """Without sockets of its own: connections are brought to it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the daemon's."""
        yield


class Listener:
    def __init__(
        self,
        reception: Reception,
        listener: socket.socket,
        certificates: Certificates | None,
        connection_limits: ConnectionLimits,
        protocol: type[Doorkeeper] = Doorkeeper,
    ) -> None:
        """Without certificates there is no TLS."""
        self._connection_limits = connection_limits
        self._arriving: set[asyncio.Task[Any]] = set()
        self._reception = reception
        self._protocol = protocol
        self._listener = listener
        self._certificates = certificates
        self._over = asyncio.Event()

    def close(self) -> None:
        self._over.set()

    def withdraw(self, identity: str) -> None:
        self._reception.withdraw(identity)

    async def serve(self) -> None:
        """Until closed or cancelled; nobody is served any more when it returns."""
        context = self._certificates.make_context() if self._certificates else None
        server = QuietServer(
            uvicorn.Config(
                self._reception,
                http=self._protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # who is at the other end is what the kernel says
                timeout_graceful_shutdown=1,
                ssl_context_factory=(lambda config, usual: context) if context else None,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[]))
        over = asyncio.create_task(self._over.wait())
        acceptor = Acceptor(self._listener, lambda client, address: self._take(server, context, client, address))
        try:
            await server.ready.wait()
            acceptor.open()
            while not serving.done() and not over.done():
                await asyncio.wait({serving, over}, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
                if self._certificates and context and self._patience() == 0:
                    self._certificates.renew(context)
        finally:
            over.cancel()
            acceptor.close()
            for task in self._arriving:
                task.cancel()
            await asyncio.shield(asyncio.create_task(self._end(server, serving)))

    def _take(
        self, server: QuietServer, context: ssl.SSLContext | None, client: socket.socket, address: tuple[Any, ...]
    ) -> None:
        connection = Connection(self._connection_limits)
        peer = self._connection_limits.connect(name_source(address[0]), 1, connection.close)
        if peer is None:
            client.close()
            return
        connection.peer = peer

        def make() -> Doorkeeper:
            connection.protocol = self._protocol(server.config, server.server_state, {CONNECTION: connection})
            return connection.protocol

        task = attach(make, client, connection.leave, tls=context, patience=PATIENCE)
        connection.arriving = task
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _patience(self) -> float | None:
        """Until the certificate has to be renewed."""
        if self._certificates is None or self._certificates.worn_at == float("inf"):
            return None
        return max(0.0, self._certificates.worn_at - time.time())

    async def _end(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        server.should_exit = True
        await asyncio.wait({serving})
        self._listener.close()  # not before: the loop still looks at it
        await self._reception.close()
