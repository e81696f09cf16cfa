"""Accepts connections from a listening socket, also when the daemon runs out of descriptors.

asyncio's own servers then log a line for every connection that they cannot accept, a thousand at a time, and try again
for each. The acceptor logs one line and tries again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from k8e.core.log.daemon_log import format_event

BATCH: Final = 32  # connections in one turn of the loop, which has other work
PAUSE: Final = 0.5
QUIET: Final = 60.0  # seconds between two lines in the log

log = logging.getLogger("k8e.doors")


def attach(
    make: Callable[[], asyncio.BaseProtocol],
    end: socket.socket,
    lose: Callable[[], object],
    *,
    tls: ssl.SSLContext | None = None,
    patience: float | None = None,
) -> asyncio.Task[Any]:
    """Connects a socket to a protocol, after a handshake where there is TLS. Where that fails, or the task is
    cancelled, it closes the socket and calls `lose`."""
    connecting = asyncio.get_running_loop().connect_accepted_socket(
        make, end, ssl=tls, ssl_handshake_timeout=patience if tls else None
    )
    task = asyncio.create_task(connecting)

    def finish(task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            end.close()
            lose()

    task.add_done_callback(finish)
    return task


class Acceptor:
    def __init__(self, listener: socket.socket, take: Callable[[socket.socket, Any], None]) -> None:
        """`take` gets each connection, non-blocking, and the address of its peer."""
        self._listener = listener
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._logged_at = -QUIET

    def open(self) -> None:
        self._listener.setblocking(False)
        self._paused = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more. The caller closes the socket."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory left
                self._pause(error)
                return
            client.setblocking(False)
            self._take(client, address)

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._paused = self._loop.call_later(PAUSE, self.open)
        if time.monotonic() - self._logged_at >= QUIET:
            self._logged_at = time.monotonic()
            log.warning("%s", format_event("connection_not_taken", {"cause": error.strerror or repr(error)}))
