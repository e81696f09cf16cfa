"""Serves gRPC on one port, over TLS with certificates on both sides.

`GRPC_SSL_CIPHER_SUITES` (gateway.py) leaves TLS 1.2 no cipher for the daemon's kind of key, which is how gRPC is told
to take TLS 1.3 only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from k8e.core.access.keys import Keys
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.doors.addresses import bind_port, bracket, list_names, split_address
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.grpc.call import Context, Handler
from k8e.doors.grpc.dispatcher import Dispatcher
from k8e.doors.grpc.handlers import list_handlers
from k8e.doors.grpc.handlers.agents import AgentDoor
from k8e.doors.grpc.handlers.introspection import IntrospectionHandlers
from k8e.doors.grpc.message_limits import MessageLimits
from k8e.doors.grpc.methods import MAX_MESSAGE, MESSAGE_ROOM, METHODS
from k8e.doors.grpc.proxy import Proxy
from k8e.doors.request_memory import RequestMemory
from k8e.identity import anonymous
from k8e.identity.authority import Authority, ServerCertificate

CALLS: Final = 4000  # at once, of all callers
INNER: Final = "gw.sock"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE + MESSAGE_ROOM),
    ("grpc.max_send_message_length", MAX_MESSAGE + MESSAGE_ROOM),
    ("grpc.max_concurrent_streams", 1000),
    # Clients may ping, also without a call; a dead connection is noticed.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC would measure each connection's bandwidth with a ping for nearly every call, which takes as many turns of the
    # proxy as the call itself. Instead every upload has room for a MiB at once, as on a fast line far away.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
)

log = logging.getLogger("k8e.doors.grpc")


class Router(grpc.GenericRpcHandler):
    """Serves every method as a stream of bytes in both directions, which all of them are on the wire."""

    def __init__(self, dispatcher: Dispatcher, handlers: Mapping[str, Handler]) -> None:
        self._methods = {path: self._make(dispatcher, path, handler) for path, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._methods.get(handler_call_details.method)

    def _make(self, dispatcher: Dispatcher, path: str, handler: Handler) -> grpc.RpcMethodHandler[Any, Any]:
        name = path.rpartition("/")[2]

        async def serve(_: object, context: Context) -> None:
            await dispatcher.serve(name, handler, context)

        async def serve_single(_: object, context: Context) -> bytes:
            return await dispatcher.serve(name, handler, context)

        if handler.single:
            return grpc.stream_unary_rpc_method_handler(serve_single)
        return grpc.stream_stream_rpc_method_handler(serve)


class GrpcServer:
    """Serves one port until closed."""

    def __init__(
        self,
        service: WholeService,
        keys: Keys,
        agents: AgentDoor,
        folder: Path,
        connection_limits: ConnectionLimits | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`folder`: where the socket between proxy and gRPC lies; only the daemon may enter it."""
        self._inner = folder / INNER
        self._connection_limits = connection_limits or ConnectionLimits()
        self._message_limits = MessageLimits(memory=memory)
        self._proxy: Proxy | None = None
        self._service = service
        self._keys = keys
        self._agents = agents
        self._server: grpc.aio.Server | None = None
        self._introspection = IntrospectionHandlers()
        self.credentials: ServerCredentials | None = None
        self.endpoint = ""  # for clients of this machine

    async def open(self, listen: str, names: Sequence[str]) -> None:
        """Raises Fault where it cannot listen."""
        host, port = split_address(listen)
        authority, _ = await self._keys.open()
        self.credentials = ServerCredentials(authority, list_names(host, names))
        try:
            listener = bind_port(host, port)
        except OSError as error:
            raise _closed(listen, error) from error
        proxy = Proxy(listener, str(self._inner), self._connection_limits, self._message_limits.memory)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CALLS)
        server.add_generic_rpc_handlers((self._make_router(proxy),))
        try:
            server.add_secure_port(f"unix:{self._inner}", self.credentials.make())
            self._inner.chmod(0o600)
        except (RuntimeError, OSError) as error:
            listener.close()
            raise _closed(listen, error) from error
        await server.start()
        proxy.open()
        self._server, self._proxy = server, proxy
        nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.endpoint = f"{bracket(nearby)}:{listener.getsockname()[1]}"
        log.info("gateway endpoint=%s", self.endpoint)

    def _make_router(self, proxy: Proxy) -> Router:
        handlers = list_handlers(self._service, self._keys, self._agents)
        by_path = {METHODS[name].path: handler for name, handler in handlers.items()}
        dispatcher = Dispatcher(self._service, self._keys, self._message_limits, proxy)
        return Router(dispatcher, {**by_path, **self._introspection.methods})

    async def close(self, grace: float) -> None:
        self._introspection.close()
        server, proxy = self._server, self._proxy
        self._server = self._proxy = None
        if server is not None and proxy is not None:
            proxy.close()
            await server.stop(grace)
            await proxy.finish()
            self._inner.unlink(missing_ok=True)


def _closed(listen: str, cause: Exception) -> Fault:
    error = f"the gateway cannot listen on {listen}"
    hint = "Is the port taken? [gateway] listen in k8e.toml names another one."
    return Fault(Kind.UNAVAILABLE, "gateway_closed", error, detail=str(cause), hint=hint)


class ServerCredentials:
    """The certificate in force, renewed when a third of its life is left. gRPC asks for it from its own threads, at
    every handshake, so that nothing is restarted."""

    def __init__(self, authority: Authority, names: Sequence[str]) -> None:
        self._authority = authority
        self._names = names
        self._lock = threading.Lock()
        self._current = authority.issue_server(names, time.time())
        self._used = self._current  # by gRPC

    def make(self) -> grpc.ServerCredentials:
        first = self._configure(self._current)
        fetch: Any = self._fetch  # the stubs do not know that it may return None
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)

    def renew(self) -> None:
        """Takes effect with the next handshake."""
        with self._lock:
            self._current = self._authority.issue_server(self._names, time.time())

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: the certificate has not changed."""
        if self._current.is_worn(time.time()):
            self.renew()
        with self._lock:
            if self._used is self._current:
                return None
            self._used = self._current
            return self._configure(self._current)

    def _configure(self, certificate: ServerCertificate) -> grpc.ServerCertificateConfiguration:
        roots = self._authority.certificate + anonymous.CERTIFICATE.encode()
        return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)], roots)
