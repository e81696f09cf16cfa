"""The gateway's port: counts connections and forwards them to gRPC through a unix socket, byte for byte.

gRPC accepts every connection and waits two minutes for its handshake, so that a peer that opens enough of them would
take all descriptors of the daemon. The proxy accepts them in its place. A connection that sends nothing never reaches
gRPC. gRPC knows any other by the name of the proxy's end of the unix socket, by which its calls find the connection:
where it comes from, and whether its peer is authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import Any, Final

from k8e.doors.acceptor import Acceptor
from k8e.doors.addresses import name_source
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.grpc.connection import LAST_WRITE, Connection
from k8e.doors.request_memory import RequestMemory

DESCRIPTORS: Final = 3  # of one connection: the client's, and both ends of the unix socket
_SCHEME: Final = "unix-abstract:"


class Proxy:
    def __init__(
        self, listener: socket.socket, inner: str, connection_limits: ConnectionLimits, memory: RequestMemory
    ) -> None:
        """`inner`: the path of the socket that gRPC listens on."""
        self.memory = memory
        self.connection_limits = connection_limits
        self._listener = listener
        self._inner = inner
        self._acceptor = Acceptor(listener, self._take)
        self._connections: dict[str, Connection] = {}
        self._forgotten = asyncio.Event()  # the last connection has ended

    def open(self) -> None:
        self._acceptor.open()

    def close(self) -> None:
        """Accepts no more connections; open ones stay until gRPC ends them."""
        self._acceptor.close()
        self._listener.close()

    async def finish(self) -> None:
        """Ends all connections, after gRPC has ended its sides of them: authenticated clients get its last bytes first,
        which are the answers of the calls that the daemon's stop has ended."""
        self._abort(authenticated=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE):
                while self._connections:
                    self._forgotten.clear()
                    await self._forgotten.wait()
        self._abort(authenticated=True)

    def _abort(self, *, authenticated: bool) -> None:
        for connection in list(self._connections.values()):
            if authenticated or connection.peer.payer is None:
                connection.abort()

    def find(self, peer: str) -> Connection | None:
        """Finds a connection by gRPC's name for its peer."""
        return self._connections.get(peer.removeprefix(_SCHEME))

    def forget(self, connection: Connection) -> None:
        if self._connections.pop(connection.name, None) is not None:
            self.connection_limits.disconnect(connection.peer)
        if not self._connections:
            self._forgotten.set()

    def dial(self, name: str) -> socket.socket:
        """Connects to gRPC under that name. Raises OSError."""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind(f"\0{name}")
            inner.connect(self._inner)
        except OSError:
            inner.close()
            raise
        return inner

    def _take(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        connection = Connection(self, client, f"k8e-{secrets.token_hex(8)}")
        peer = self.connection_limits.connect(name_source(address[0]), DESCRIPTORS, connection.abort)
        if peer is None:
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.peer = peer
        self._connections[connection.name] = connection
        connection.start()
