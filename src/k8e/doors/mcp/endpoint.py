"""The MCP door as the daemon has it: routes of the HTTP door through which clients connect. Imports nothing heavy.

The SDK takes a second or two to load, and slows every command meanwhile. A thread loads it when the daemon has had
nothing to do for a while, or when the first client connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from k8e.core.access.access import find_payer, may_see
from k8e.core.access.keys import Keys
from k8e.core.checks import check_name
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import format_event
from k8e.core.model import REMOTE, Caller
from k8e.doors.addresses import bind_port, list_names, split_address
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.errors import invalid
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.http.routes import JSON, LINES, Route
from k8e.doors.request_memory import RequestMemory
from k8e.profiles.text import to_json

if TYPE_CHECKING:
    from k8e.doors.mcp.bridge import Bridge
    from k8e.doors.mcp.certificates import TlsCertificate
    from k8e.doors.mcp.clients import McpClient
    from k8e.doors.mcp.protocol import ProtocolServer
    from k8e.doors.mcp.server import McpServer
    from k8e.doors.mcp.transport.stdio import ByteStream, StdioTransport

LOAD_DELAY: Final = 5.0  # seconds of quiet before the SDK is loaded, where no client connects before
QUIET: Final = 0.005  # of a processor: the daemon's upkeep takes less, a command every second more
LITTLE: Final = 64 << 10
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("k8e.doors.mcp")


async def wait_quiet(seconds: float) -> None:
    """Returns when this process has done next to nothing for so long."""
    while True:
        before = time.process_time()
        await asyncio.sleep(seconds)
        if time.process_time() - before <= QUIET * seconds:
            return


class McpEndpoint:
    def __init__(
        self,
        service: WholeService,
        keys: Keys,
        names: Sequence[str] = (),
        connection_limits: ConnectionLimits | None = None,
        memory: RequestMemory | None = None,
        *,
        succeeded: bool = False,
    ) -> None:
        """`names`: this machine's names for other machines, besides its own host name. `succeeded`: another gateway
        takes the place of this one, and goes on with the sessions of clients that have no connection."""
        self._memory = memory or RequestMemory()
        self._connection_limits = connection_limits or ConnectionLimits()
        self._service = service
        self._keys = keys
        self._names = names
        self._succeeded = succeeded
        keys.watch(self._revoke)
        self._loading = asyncio.Lock()
        self._loaded = False
        self._connections: set[StdioTransport] = set()
        self._servers: set[McpServer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fewer = asyncio.Event()
        self._closing = False

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", ("v1", "mcp"), self.connect, (LINES,)),
            Route("POST", ("v1", "mcp", "listen"), self.listen, (JSON,)),
        )

    async def prepare(self, seconds: float = LOAD_DELAY) -> None:
        from k8e.doors.mcp.clients import reclaim

        try:
            await reclaim(self._service, handles=not self._succeeded)
        except Fault as fault:
            log.warning("%s", format_event(fault.code, {"cause": fault.error, "detail": fault.detail}))
        await wait_quiet(seconds)
        await self._load()

    async def _load(self) -> None:
        async with self._loading:
            if not self._loaded:
                await asyncio.to_thread(load_sdk)
                self._loaded = True

    async def connect(self, exchange: Exchange, request: Request) -> None:
        """Serves one client, whose bridge carries its lines in this request and the answers back."""
        query = Fields(request.query)
        tenant, name = query.take_text("tenant_id"), query.take_text("front", "k8e")
        cwd, home = query.take_text("cwd"), query.take_text("home")
        answers = query.take_text("answers") == "1"
        query.finish()
        await self._load()
        from k8e.doors.mcp.bridge import Bridge
        from k8e.doors.mcp.clients import KeepingClient
        from k8e.doors.mcp.protocol import ProtocolServer
        from k8e.doors.mcp.tools.session_specs import ClientFolders
        from k8e.doors.mcp.toolsets import TOOLSETS

        if name not in TOOLSETS:
            raise invalid("front", f"{name[:64]!r} is no front", hint=f"one of: {', '.join(TOOLSETS)}")
        toolset = TOOLSETS[name]
        client = await self._make_client(exchange.caller, tenant)
        if toolset.keeps_named:
            client = KeepingClient(self._service, exchange.caller, tenant, toolset.name)
        await exchange.start_pieces(LINES)
        bridge = Bridge(exchange.send_piece) if answers else None
        await self._serve(client, ProtocolServer(client, toolset, ClientFolders(cwd, home), bridge), exchange, bridge)
        await exchange.end_frames()

    async def serve(self, caller: Caller, tenant: str, stream: ByteStream) -> None:
        """Serves one client of another door, until its stream ends or the task is cancelled."""
        client = await self._make_client(caller, tenant)
        from k8e.doors.mcp.protocol import ProtocolServer

        await self._serve(client, ProtocolServer(client), stream)

    async def _make_client(self, caller: Caller, tenant: str) -> McpClient:
        """Raises Fault for a tenant that is not the caller's, and while the daemon stops."""
        await self._load()
        if self._closing:
            hint = "Nothing was done. Try again: the next daemon answers."
            raise Fault(Kind.UNAVAILABLE, "daemon_stopping", "the daemon is stopping", hint=hint)
        from k8e.doors.mcp.clients import McpClient

        if tenant:
            check_name("tenant_id", tenant)  # which a part of a tenant does not pass
        if tenant and not may_see(caller, caller.uid, tenant):
            hint = "leave tenant_id out, or name the tenant of your key"
            raise Fault(Kind.DENIED, "wrong_tenant", "this is another tenant's", field="tenant_id", hint=hint)
        client = McpClient(self._service, caller, tenant, known=caller.uid != REMOTE)
        await self._service.sessions.list(client.caller)
        return client

    async def _serve(
        self, client: McpClient, server: ProtocolServer, stream: ByteStream, bridge: Bridge | None = None
    ) -> None:
        from k8e.doors.mcp.transport.stdio import StdioTransport

        allocation = self._memory.allocate(find_payer(client.caller.uid, client.caller.tenant))
        connection = StdioTransport(stream, server, allocation, bridge)
        self._connections.add(connection)
        try:
            if self._closing:
                connection.close()
            await connection.serve()
        finally:
            self._connections.discard(connection)
            self._fewer.set()
            self._spawn(client.close())

    async def listen(self, exchange: Exchange, request: Request) -> None:
        """Serves many clients on an address, until the caller ends this request."""
        fields = Fields(decode_object(await exchange.read_body(request, LITTLE)))
        address, tenant = fields.take_text("http_addr"), fields.take_text("tenant_id")
        supplied = (fields.take_text("certificate"), fields.take_text("key"))
        fields.finish()
        await self._load()
        from k8e.doors.mcp.authentication import Authenticator, ListenAddress
        from k8e.doors.mcp.server import McpServer, bind, name_url, read_address
        from k8e.doors.mcp.transport.http import HttpTransport

        await self._make_client(exchange.caller, tenant)
        ip, port = read_address(address)
        certificate = await self._find_certificate(str(ip), supplied, needed=not ip.is_loopback)
        listener = bind(ip, port, exchange.caller)
        if not ip.is_loopback:
            await self._service.expose()
        listen = ListenAddress(
            port=listener.getsockname()[1],
            names=(*(certificate.names if certificate else ()), *(LOOPBACK if ip.is_loopback else ())),
            secure=certificate is not None,
            user=exchange.caller if ip.is_loopback else None,
            tenant=tenant,
        )
        transport = HttpTransport(self._service, Authenticator(listen, self._keys), tenant, self._spawn, self._memory)
        server = McpServer(transport, listener, certificate, self._connection_limits)
        self._servers.add(server)
        told = {"listening": name_url(listener, listen.scheme), "key_needed": listen.user is None}
        if certificate is not None and not supplied[0]:
            told["ca_certificate"] = str(self._keys.authority_file)
        try:
            await exchange.start_pieces(LINES)
            await exchange.send_piece(to_json(told))
            if self._closing:
                server.close()
            await server.serve()
            await exchange.end_frames()
        finally:
            self._servers.discard(server)
            self._fewer.set()

    async def open(self, address: str) -> int:
        """Serves clients with API keys on an address until `close`, always with TLS; returns its port. Connections wait
        until the SDK is loaded. Raises OSError."""
        host, port = split_address(address)
        listener = bind_port(host, port)
        await self._service.expose()
        self._spawn(self._serve_address(host, listener))
        found: int = listener.getsockname()[1]
        return found

    async def _serve_address(self, host: str, listener: socket.socket) -> None:
        try:
            server = await self._make_server(host, listener)
        except BaseException:
            listener.close()
            raise
        self._servers.add(server)
        if self._closing:
            server.close()
        try:
            await server.serve()
        finally:
            self._servers.discard(server)
            self._fewer.set()

    async def _make_server(self, host: str, listener: socket.socket) -> McpServer:
        await self._load()
        from k8e.doors.mcp.authentication import Authenticator, ListenAddress
        from k8e.doors.mcp.certificates import IssuedCertificate
        from k8e.doors.mcp.server import McpServer
        from k8e.doors.mcp.transport.http import HttpTransport

        authority, _ = await self._keys.open()
        certificate = IssuedCertificate(authority, list_names(host, self._names))
        listen = ListenAddress(port=None, names=tuple(certificate.names), secure=True, user=None)
        parts = (self._service, Authenticator(listen, self._keys), "", self._spawn, self._memory)
        transport = HttpTransport(*parts, succeeded=self._succeeded)
        return McpServer(transport, listener, certificate, self._connection_limits)

    async def _find_certificate(self, host: str, supplied: tuple[str, str], *, needed: bool) -> TlsCertificate | None:
        """The supplied certificate, or one of the daemon's own authority where keys travel over a network."""
        from k8e.doors.mcp.certificates import IssuedCertificate, SuppliedCertificate

        if any(supplied):
            return SuppliedCertificate(*supplied)
        if not needed:
            return None
        authority, _ = await self._keys.open()
        return IssuedCertificate(authority, list_names(host, self._names))

    def _revoke(self, identity: str) -> None:
        for server in list(self._servers):
            server.revoke(identity)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what follows the end of a connection, also while its task is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fewer.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", format_event("not_left_well", {"cause": repr(error)}))

    async def close(self, grace: float) -> None:
        """Ends all connections, and what ends with them. Agents that connect meanwhile are refused."""
        self._closing = True
        for connection in self._connections:
            connection.close()
        for server in self._servers:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._connections or self._servers or self._tasks:
                    self._fewer.clear()
                    await self._fewer.wait()


def load_sdk() -> None:
    import k8e.doors.mcp.server
    import k8e.doors.mcp.transport.stdio  # noqa: F401 - the two import all the rest

    # Their log lines name sessions, and these names are secrets.
    for name in ("mcp", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.ERROR)
