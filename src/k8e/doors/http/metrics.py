"""/metrics on a TCP port of its own, for Prometheus: the only request that is answered there, for every peer. What it
says has words from our own code only, so it tells nothing about any user."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from k8e.core.log.daemon_log import format_event
from k8e.doors.acceptor import Acceptor
from k8e.doors.addresses import bind_port
from k8e.doors.http.handlers.status import PROMETHEUS

_MOST: Final = 16  # connections at a time: further ones are closed
_HEAD: Final = 8 << 10
_PATIENCE: Final = 5.0  # seconds for a request, and for its answer

log = logging.getLogger("k8e.doors.http")


class MetricsServer:
    def __init__(self, render: Callable[[], str]) -> None:
        self._render = render
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor: Acceptor | None = None
        self._listener: socket.socket | None = None
        self.port = 0

    def open(self, listen: str) -> None:
        """Where that fails, the daemon goes on without it, and its log says so."""
        host, _, port = listen.rpartition(":")
        try:
            self._listener = bind_port(host.strip("[]"), int(port))
        except OSError as error:
            log.warning("%s", format_event("metrics_not_served", {"listen": listen, "cause": error}))
            return
        self.port = self._listener.getsockname()[1]
        self._acceptor = Acceptor(self._listener, self._take)
        self._acceptor.open()

    def _take(self, peer: socket.socket, address: Any) -> None:
        if len(self._tasks) >= _MOST:
            peer.close()
            return
        task = asyncio.create_task(self._answer(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with peer, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                head = b""
                while b"\r\n\r\n" not in head and len(head) < _HEAD:
                    if not (data := await loop.sock_recv(peer, 4096)):
                        return
                    head += data
            words = head.split(b"\r\n", 1)[0].split(b" ")
            known = len(words) == 3 and words[0] == b"GET" and words[1].partition(b"?")[0] == b"/metrics"
            status, body = ("200 OK", self._render().encode()) if known else ("404 Not Found", b"")
            fields = f"Content-Type: {PROMETHEUS}\r\nContent-Length: {len(body)}\r\nConnection: close"
            async with asyncio.timeout(_PATIENCE):
                await loop.sock_sendall(peer, f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)

    async def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._listener is not None:
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
