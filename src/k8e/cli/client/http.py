"""A client for one server: our own door on its unix socket (docs/http-api.md).

`_socket` and `_json` are the C inside `socket` and `json`; the wrappers would cost more than everything else together.
"""

from __future__ import annotations

import errno
import os
import sys
from _json import encode_basestring_ascii
from _socket import AF_UNIX, SO_RCVTIMEO, SO_SNDTIMEO, SOCK_STREAM, SOL_SOCKET, socket

from k8e.cli.client.response import Response
from k8e.cli.process import read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol, TypeAlias

    from k8e.cli.remote.client import RemoteClient

    AnyClient: TypeAlias = "Client | RemoteClient"

    class Whose(Protocol):
        tenant_id: str
        owner: str


PATIENCE = 30.0  # seconds; a daemon that has said nothing for so long, though it was asked twice, is silent
JSON = "application/json"
BYTES = "application/octet-stream"
FRAMES = "application/x-k8e-frames"
STDIN, REQUEST = 0, 3  # kinds of frames


def run_dir() -> str:
    return os.environ.get("K8E_RUN_DIR") or "/run/k8e"


# Any of them means a gateway and not the daemon of this machine. Flags become variables (parser.py).
ELSEWHERE = ("K8E_SANDBOX_ENDPOINT", "K8E_SANDBOX_PROFILE", "K8E_SANDBOX_APIKEY", "K8E_SANDBOX_CERT")


def open_client() -> AnyClient:
    """To whom it concerns: the gateway that was named, else the daemon of this machine, else the gateway that was
    connected to last, else the daemon, which is started."""
    environ = os.environ
    for name in ELSEWHERE:
        if environ.get(name):
            return open_remote()
    if not os.path.exists(run_dir() + "/k8e.sock"):
        profiles = os.path.expanduser("~/.k8e/sandbox/profiles.yaml")
        if os.path.exists(profiles):
            from k8e.cli.remote.profiles import Profiles

            if current := Profiles().current:
                return open_remote(current)
    return Client()


def open_remote(profile: str = "") -> RemoteClient:
    quieten_grpc()
    from k8e.cli.remote.client import RemoteClient
    from k8e.cli.remote.discovery import find_target

    return RemoteClient(find_target(profile))


def quieten_grpc() -> None:
    """Before it is loaded: what is wrong is ours to say."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def find_patience() -> float:
    """Of people with a slow machine, or of tests."""
    try:
        return max(float(os.environ.get("K8E_PATIENCE") or PATIENCE), 0.1)
    except ValueError:
        return PATIENCE


def set_patience(connection: socket, seconds: float) -> None:
    """To send, to receive and to connect: what takes longer fails as if the socket did not block."""
    whole, rest = divmod(int(seconds * 1_000_000), 1_000_000)
    span = whole.to_bytes(8, sys.byteorder) + rest.to_bytes(8, sys.byteorder)
    connection.setsockopt(SOL_SOCKET, SO_RCVTIMEO, span)
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, span)


def connect() -> socket:
    """To the daemon, which is started when it is not there."""
    path = run_dir() + "/k8e.sock"
    connection = socket(AF_UNIX, SOCK_STREAM)
    patience = find_patience()
    try:
        set_patience(connection, patience)
        connection.connect(path)
    except OSError as error:
        connection.close()
        if error.errno == errno.EAGAIN:
            from k8e.cli.client.failures import crowded

            raise crowded(path) from error
        if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
            from k8e.cli.client.launch import explain

            raise explain(path, error) from error
        from k8e.cli.client.launch import start_daemon

        connection = start_daemon(path)
    set_patience(connection, patience / 3)
    return connection


class Client:
    """One request after the other. A request is never sent twice."""

    place = endpoint = ""  # this machine

    def __init__(self) -> None:
        self._connection = connect()
        self._usable = True

    def request(
        self, method: str, target: str, body: bytes = b"", content_type: str = "", *, accept: str = "*/*"
    ) -> Response:
        fields = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if content_type else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n{fields}\r\n"
        return self._exchange(head.encode("ascii") + body, harmless=method == "GET")

    def send(self, method: str, target: str, pieces: Iterable[bytes], content_type: str) -> Response:
        """A body of any length, as it comes. Refused before its end, the answer says why."""
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
        return Response(self._connection, early=True)

    def upload(self, target: str, first: bytes) -> Response:
        """A request whose body goes on (`feed`) after the answer has begun; `first` is its first frame, JSON."""
        head = (
            f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FRAMES}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        return self._exchange(head.encode("ascii") + pack_chunk(REQUEST, first))

    def feed(self, descriptor: int) -> None:
        """Sends what can be read there as stdin, to its end. For a thread: waits while the command does not take it."""
        try:
            while piece := read_some(descriptor):
                send_patiently(self._connection, pack_chunk(STDIN, piece))
        except OSError:
            return  # the command has ended, and with it the connection
        self.end_feed()

    def end_feed(self) -> None:
        try:
            send_patiently(self._connection, b"0\r\n\r\n")
        except OSError:
            pass

    def _renew(self) -> None:
        if not self._usable:
            self._connection.close()
            self._connection = connect()

    def _exchange(self, request: bytes, *, harmless: bool = False) -> Response:
        self._renew()
        whole = True
        try:
            self._send(request, harmless=harmless)
        except ConnectionError:
            whole = False  # refused before it was sent to the end: the answer says why
        response = Response(self._connection, harmless=harmless, whole=whole)
        self._usable = response.headers.get("connection") != "close"
        return response

    def _send(self, data: bytes, *, harmless: bool = False) -> None:
        """A daemon that takes nothing for a while is asked whether it is there."""
        silences = 0
        view = memoryview(data)
        while view:
            try:
                view = view[self._connection.send(view) :]
                silences = 0
            except BlockingIOError:
                from k8e.cli.client.failures import check_presence

                silences += 1
                check_presence(self._connection, silences, harmless=harmless)


def send_patiently(connection: socket, data: bytes) -> None:
    """However long it takes: for a thread, beside one that reads and notices a daemon that is silent."""
    view = memoryview(data)
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            pass


def pack_chunk(kind: int, data: bytes) -> bytes:
    """A frame in a chunk."""
    return b"%x\r\n%c%b%b\r\n" % (len(data) + 5, kind, len(data).to_bytes(4, "big"), data)


def quote(text: str) -> str:
    """For a path or query: everything but what needs no quoting anywhere."""
    plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in os.fsencode(text))


def aim(target: str, options: Whose) -> str:
    """With whose session is meant, where somebody says so."""
    for name in ("tenant_id", "owner"):
        if value := getattr(options, name):
            target += f"{'&' if '?' in target else '?'}{name}={quote(value)}"
    return target


def quote_json(text: str) -> str:
    """A JSON string. Whatever the locale, the bytes of an argument arrive as they were typed."""
    return encode_basestring_ascii(os.fsencode(text).decode("utf-8", "surrogateescape"))
