"""HTTP/1.1 to one server, the daemon on its unix socket: connections, requests, and the JSON in their bodies.

`_socket` and `_json` are the C inside `socket` and `json`; the wrappers would cost more than everything else together.
"""

from __future__ import annotations

import os
import sys
from _json import encode_basestring_ascii
from _socket import AF_UNIX, SHUT_RDWR, SO_RCVTIMEO, SO_SNDTIMEO, SOCK_STREAM, SOL_SOCKET, socket

from k8e.cli.client import JSON, find_patience, run_dir
from k8e.cli.process import UNREACHABLE, Failure, read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k8e.cli.client.response import Response

FRAMES = "application/x-k8e-frames"
STDIN, REQUEST = 0, 3  # kinds of frames


def set_patience(connection: socket, seconds: float) -> None:
    """Limits each send, receive and connect: what takes longer fails as if the socket did not block."""
    whole, rest = divmod(int(seconds * 1_000_000), 1_000_000)
    span = whole.to_bytes(8, sys.byteorder) + rest.to_bytes(8, sys.byteorder)
    connection.setsockopt(SOL_SOCKET, SO_RCVTIMEO, span)
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, span)


def connect() -> socket:
    """Connects to the daemon, and starts the daemon if it does not run."""
    path = run_dir() + "/k8e.sock"
    connection = socket(AF_UNIX, SOCK_STREAM)
    patience = find_patience()
    try:
        set_patience(connection, patience)
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        from k8e.cli.client.launch import start_daemon

        connection = start_daemon(path)
    except OSError as error:
        connection.close()
        from k8e.cli.client.failures import not_connected

        raise not_connected(path, error) from error
    set_patience(connection, patience / 3)
    return connection


class Connection:
    """Sends one request after the other. No request that a daemon may have begun is sent twice. `meanwhile` is called
    when a request was sent, before its answer is waited for: what is imported there costs no time."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._socket = connect()
        self._usable = True
        self._meanwhile = meanwhile

    def request(
        self, method: str, target: str, body: bytes = b"", content_type: str = "", *, accept: str = "*/*"
    ) -> Response:
        fields = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if content_type else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n{fields}\r\n"
        return self._exchange(head.encode("ascii") + body, harmless=method == "GET")

    def send(self, method: str, target: str, pieces: Iterable[bytes], content_type: str) -> Response:
        """Sends a body of any length piece by piece. If the daemon refuses it before its end, the answer says why."""
        self._renew()
        fields = f"Content-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n"
        self._usable = False
        try:
            self._send(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode("ascii"))
            for piece in pieces:
                self._send(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._send(b"0\r\n\r\n")
        except ConnectionError:
            pass
        from k8e.cli.client.response import Response

        return Response(self._socket, early=True)

    def post(self, target: str, wanted: object) -> Response:
        return self.request("POST", target, pack(wanted).encode("ascii"), JSON)

    def upload(self, target: str, wanted: object) -> Response:
        """Sends a request whose body goes on (`feed`) after the answer has begun; `wanted` is its first frame."""
        head = (
            f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FRAMES}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        return self._exchange(head.encode("ascii") + pack_chunk(REQUEST, pack(wanted).encode("ascii")))

    def begin(self, target: str) -> Response:
        """Sends a request whose body goes on (`write`, `end_body`) after the answer has begun."""
        fields = "Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n"
        return self._exchange(f"POST {target} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode("ascii"))

    def write(self, piece: bytes) -> None:
        """Waits while the daemon reads nothing."""
        send_patiently(self._socket, b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_body(self) -> None:
        send_patiently(self._socket, b"0\r\n\r\n")

    def close(self) -> None:
        """Also ends what another thread waits for here."""
        self.shut()
        self._socket.close()

    def shut(self) -> None:
        """Ends what another thread waits for here, which then closes it."""
        try:
            self._socket.shutdown(SHUT_RDWR)
        except OSError:
            pass  # the daemon was first

    def feed(self, descriptor: int) -> None:
        """Sends what can be read there as stdin, to its end. For a thread: it waits while the command reads nothing."""
        try:
            try:
                while piece := read_some(descriptor):
                    self.type(piece)
            except Failure:
                pass  # unreadable, such as a terminal from the background: the command sees the end of its input
            self.end_body()
        except OSError:
            pass  # the command has ended, and with it the connection

    def type(self, piece: bytes) -> None:
        """Sends it as stdin."""
        send_patiently(self._socket, pack_chunk(STDIN, piece))

    def _renew(self) -> None:
        if not self._usable:
            self._socket.close()
            self._socket = connect()

    def _exchange(self, request: bytes, *, harmless: bool = False) -> Response:
        """A daemon that was killed takes connections until its last thread has ended. A request that such a daemon has
        certainly not begun, or that only asks, is sent once more, to the next daemon; no other ever is."""
        try:
            return self._send_and_wait(request, harmless=harmless)
        except Failure as failure:
            if failure.code != "connection_lost" or failure.status != UNREACHABLE:
                raise
        self._usable = False
        return self._send_and_wait(request, harmless=harmless)

    def _send_and_wait(self, request: bytes, *, harmless: bool = False) -> Response:
        self._renew()
        whole = True
        try:
            self._send(request, harmless=harmless)
        except ConnectionError:
            whole = False  # refused before it was sent to the end: the answer says why
        from k8e.cli.client.response import Response

        self._meanwhile()
        response = Response(self._socket, harmless=harmless, whole=whole)
        self._usable = response.headers.get("connection") != "close"
        return response

    def _send(self, data: bytes, *, harmless: bool = False) -> None:
        """Asks whether the daemon lives, each time it has read nothing for a while."""
        silences = 0
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
                silences = 0
            except BlockingIOError:
                from k8e.cli.client.failures import check_presence

                silences += 1
                check_presence(self._socket, silences, harmless=harmless)


def send_patiently(connection: socket, data: bytes) -> None:
    """However long it takes: for a thread beside one that reads, and notices a daemon that is silent."""
    view = memoryview(data)
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            pass


def pack_chunk(kind: int, data: bytes) -> bytes:
    """A frame in a chunk."""
    return b"%x\r\n%c%b%b\r\n" % (len(data) + 5, kind, len(data).to_bytes(4, "big"), data)


def pack(value: object) -> str:
    """JSON in ASCII. Whatever the locale, the bytes of an argument arrive as they were typed."""
    if isinstance(value, str):
        return encode_basestring_ascii(os.fsencode(value).decode("utf-8", "surrogateescape"))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value)) or repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{pack(key)}: {pack(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(pack, value)) + "]"
    raise TypeError(type(value))
