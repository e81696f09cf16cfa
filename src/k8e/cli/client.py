"""A client for one server: our own door on its unix socket (docs/http-api.md).

`_socket` and `_json` are the C inside `socket` and `json`; the wrappers would cost more than everything else together.
"""

from __future__ import annotations

import errno
import os
from _json import encode_basestring_ascii
from _socket import AF_UNIX, SOCK_STREAM, socket

from k8e.cli.ending import UNREACHABLE, Failure, read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Protocol, TypeAlias

    from k8e.cli.remote.client import RemoteClient

    AnyClient: TypeAlias = "Client | RemoteClient"

    class Whose(Protocol):
        tenant_id: str
        owner: str


PIECE = 256 << 10
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
            from k8e.cli.remote.files import Profiles

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


def connect() -> socket:
    """To the daemon, which is started when it is not there."""
    path = run_dir() + "/k8e.sock"
    connection = socket(AF_UNIX, SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
            from k8e.cli.launch import explain

            raise explain(path, error) from error
        from k8e.cli.launch import start_daemon

        return start_daemon(path)
    return connection


def lost(error: OSError | None = None) -> Failure:
    return Failure(
        "connection_lost",
        "the daemon went away before it had answered",
        detail=str(error or ""),
        hint="a command that was running may still be: `k8e sandbox log SESSION` lists them",
        status=UNREACHABLE,
    )


class Response:
    """The head, and the body as far as it was asked for."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._buffer = b""
        self.wait: Callable[[], None] | None = None  # called before there may be something to wait for
        self.status = 0
        self.headers: dict[str, str] = {}
        while self.status < 200:
            self._read_head()

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    @property
    def exit_code(self) -> int | None:
        """Of the command. With frames it comes after them. None is unknown, which is never success."""
        text = self.headers.get("k8e-exit-code")
        return None if text is None else int(text)

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            yield from self._chunks()
        else:
            yield from self._take(int(self.headers["content-length"]))

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(kind, some of its bytes). What is JSON (kind 3 and up) comes whole, output as it comes."""
        pending = b""
        kind, missing = 0, 0
        for piece in self.pieces():
            pending += piece
            while pending:
                if not missing:
                    if len(pending) < 5:
                        break
                    kind, missing = pending[0], int.from_bytes(pending[1:5], "big")
                    pending = pending[5:]
                if kind > 2 and len(pending) < missing:
                    break
                part, pending = pending[:missing], pending[missing:]
                missing -= len(part)
                yield kind, part

    def _read_head(self) -> None:
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        self._read_fields(lines)

    def _read_fields(self, lines: list[str]) -> None:
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._line(), 16):
            yield from self._take(size)
            self._line()
        trailer = []
        while line := self._line():
            trailer.append(line)
        self._read_fields(trailer)

    def _line(self) -> str:
        while b"\r\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line.decode("latin-1")

    def _take(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._buffer:
                self._receive()
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            yield piece

    def _receive(self) -> None:
        if self.wait is not None:
            self.wait()
        try:
            data = self._connection.recv(PIECE)
        except ConnectionError as error:
            raise lost(error) from error
        if not data:
            raise lost()
        self._buffer += data


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
        return self._exchange(head.encode("ascii") + body)

    def send(self, method: str, target: str, pieces: Iterable[bytes], content_type: str) -> Response:
        """A body of any length, as it comes. Refused before its end, the answer says why."""
        if not self._usable:
            self._connection.close()
            self._connection = connect()
        fields = f"Content-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n"
        self._usable = False
        try:
            self._connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode("ascii"))
            for piece in pieces:
                self._connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._connection.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass
        return Response(self._connection)

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
                self._connection.sendall(pack_chunk(STDIN, piece))
        except OSError:
            return  # the command has ended, and with it the connection
        self.end_feed()

    def end_feed(self) -> None:
        try:
            self._connection.sendall(b"0\r\n\r\n")
        except OSError:
            pass

    def _exchange(self, request: bytes) -> Response:
        if not self._usable:
            self._connection.close()
            self._connection = connect()
        try:
            self._connection.sendall(request)
        except ConnectionError:
            pass  # refused before it was sent to the end: the answer says why
        response = Response(self._connection)
        self._usable = response.headers.get("connection") != "close"
        return response


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
