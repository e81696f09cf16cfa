"""An address that leads to a gateway, or refuses connections, as a Service does while its gateways change."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing tells the other end at once


class Relay:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = self._bind(0)  # refuses until it listens
        self._port: int = self._listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self._port}"

    def _bind(self, port: int) -> socket.socket:
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
        return found

    def open(self) -> None:
        self._listener.listen()
        self._start(self._accept, self._listener)

    def _start(self, work: Callable[..., None], *sockets: socket.socket) -> None:
        thread = threading.Thread(target=work, args=sockets, daemon=True)
        self._threads.append(thread)
        thread.start()

    def refuse(self) -> None:
        """Ends all connections; the port stays ours."""
        with contextlib.suppress(OSError):  # it does not listen
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = self._bind(self._port)
        if self._threads:
            self._threads.pop(0).join()  # from now on there are no more connections
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        self.refuse()
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    inner = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._sockets += (client, inner)
                for source, sink in ((client, inner), (inner, client)):
                    self._start(_copy, source, sink)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(65_536):
            sink.sendall(content)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    source.close()  # the other thread closes the other one
