"""The part of the library `grpc` that the command line uses, over h2: channels with TLS, the four kinds of calls, and
their errors. main.py puts it in that library's place.

A thread reads each connection; what is sent is sent under the connection's lock. No call is made twice.
"""

from __future__ import annotations

import base64
import enum
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from k8e.cli.standalone.http2 import Broken, Connection, Credentials, Stream

HEADER = 5  # bytes before each message: compressed or not, and its length
Metadata = Iterable[tuple[str, str | bytes]]


class StatusCode(enum.Enum):
    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    def __init__(self, code: StatusCode, details: str, trailing: Sequence[tuple[str, str | bytes]] = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, tuple(trailing)

    def code(self) -> StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._trailing


def ssl_channel_credentials(
    root_certificates: bytes | None = None, private_key: bytes = b"", certificate_chain: bytes = b""
) -> Credentials:
    return Credentials(root_certificates, private_key, certificate_chain)


def secure_channel(target: str, credentials: Credentials, options: Iterable[tuple[str, int]] = ()) -> Channel:
    return Channel(target, credentials, dict(options))


class Channel:
    """Connects at the first call."""

    def __init__(self, target: str, credentials: Credentials, options: dict[str, int]) -> None:
        self._target, self._credentials, self._options = target, credentials, options
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def unary_unary(self, path: str, serialize: Any = None, deserialize: Any = None) -> Callable[..., Any]:
        return lambda message, timeout=None, metadata=(): self._take_one(
            self._start(path, iter((message,)), serialize, deserialize, timeout, metadata)
        )

    def stream_unary(self, path: str, serialize: Any = None, deserialize: Any = None) -> Callable[..., Any]:
        return lambda messages, timeout=None, metadata=(): self._take_one(
            self._start(path, messages, serialize, deserialize, timeout, metadata, threaded=True)
        )

    def unary_stream(self, path: str, serialize: Any = None, deserialize: Any = None) -> Callable[..., Call]:
        return lambda message, timeout=None, metadata=(): self._start(
            path, iter((message,)), serialize, deserialize, timeout, metadata
        )

    def stream_stream(self, path: str, serialize: Any = None, deserialize: Any = None) -> Callable[..., Call]:
        return lambda messages, timeout=None, metadata=(): self._start(
            path, messages, serialize, deserialize, timeout, metadata, threaded=True
        )

    @staticmethod
    def _take_one(call: Call) -> Any:
        found = list(call)
        if len(found) != 1:
            raise RpcError(StatusCode.INTERNAL, f"{len(found)} messages where one was expected")
        return found[0]

    def _start(
        self,
        path: str,
        messages: Iterator[Any],
        serialize: Any,
        deserialize: Any,
        timeout: float | None,
        metadata: Metadata,
        *,
        threaded: bool = False,
    ) -> Call:
        most_in = self._options.get("grpc.max_receive_message_length", 4 << 20)
        most_out = self._options.get("grpc.max_send_message_length", -1)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            stream = self._connect().open(list_headers(self._target, path, timeout, metadata))
        except Broken as error:
            raise RpcError(StatusCode.UNAVAILABLE, str(error)) from error
        call = Call(stream, deserialize or bytes, deadline, most_in)
        if threaded:
            sender = threading.Thread(target=call.send_all, args=(messages, serialize, most_out), daemon=True)
            sender.start()
        else:
            call.send_all(messages, serialize, most_out)
        return call

    def _connect(self) -> Connection:
        with self._lock:
            if self._connection is None or self._connection.ended or self._connection.is_closing:
                keepalive = self._options.get("grpc.keepalive_time_ms", 30_000) / 1000
                patience = self._options.get("grpc.keepalive_timeout_ms", 20_000) / 1000
                self._connection = Connection(self._target, self._credentials, keepalive, patience)
            return self._connection


def list_headers(target: str, path: str, timeout: float | None, metadata: Metadata) -> list[tuple[str, str]]:
    headers = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", target)]
    headers += [("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "k8e-standalone")]
    if timeout is not None:
        headers.append(("grpc-timeout", f"{min(max(int(timeout * 1000), 1), 99_999_999)}m"))
    for name, value in metadata:
        text = base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
        headers.append((name, text))
    return headers


class Call:
    """One call: its answers can be iterated. RpcError at the end of one that failed."""

    def __init__(self, stream: Stream, deserialize: Callable[[bytes], Any], deadline: float | None, most: int) -> None:
        self._stream, self._deserialize, self._deadline, self._most = stream, deserialize, deadline, most
        self._buffer = bytearray()
        self._failure: RpcError | None = None
        self._done = False

    def send_all(self, messages: Iterator[Any], serialize: Callable[[Any], bytes] | None, most: int) -> None:
        try:
            for message in messages:
                content = serialize(message) if serialize else bytes(message)
                if 0 <= most < len(content):
                    self._fail(StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(content)} bytes is too large")
                    return
                self._stream.send(b"\0" + len(content).to_bytes(4, "big") + content, self._deadline)
            self._stream.end_sending()
        except Broken:
            pass  # the reader has the reason
        except TimeoutError:
            self._fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        except Exception as error:  # noqa: BLE001 - of the caller's iterator, in whose place we are
            self._fail(StatusCode.UNKNOWN, f"Exception iterating requests: {error!r}")

    def _fail(self, code: StatusCode, details: str) -> None:
        self._failure = RpcError(code, details)
        self._stream.cancel()

    def cancel(self) -> None:
        self._fail(StatusCode.CANCELLED, "Locally cancelled by application!")

    def is_active(self) -> bool:
        return not self._done and not self._stream.ended

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self._done:
            if (content := self._take_message()) is not None:
                return self._deserialize(content)
            try:
                piece = self._stream.receive(self._deadline)
            except Broken as error:
                self._done = True
                raise self._failure or RpcError(StatusCode.UNAVAILABLE, str(error)) from error
            except TimeoutError:
                self._done = True
                self._stream.cancel()
                raise self._failure or RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            if piece:
                self._buffer += piece
                continue
            self._done = True
            self._check_end()
        raise StopIteration

    def _take_message(self) -> bytes | None:
        if len(self._buffer) < HEADER:
            return None
        size = int.from_bytes(self._buffer[1:HEADER], "big")
        if self._buffer[0] != 0 or size > self._most:
            self._done = True
            self._stream.cancel()
            code = StatusCode.INTERNAL if self._buffer[0] else StatusCode.RESOURCE_EXHAUSTED
            raise RpcError(code, f"a message of {size} bytes cannot be taken")
        if len(self._buffer) < HEADER + size:
            return None
        content = bytes(self._buffer[HEADER : HEADER + size])
        del self._buffer[: HEADER + size]
        return content

    def _check_end(self) -> None:
        """The status is in the last headers."""
        if self._failure is not None:
            raise self._failure
        found = dict(self._stream.headers)
        told = found.get("grpc-status", "")
        trailing = [read_pair(name, value) for name, value in self._stream.headers]
        if not told.isascii() or not told.isdigit() or int(told) > StatusCode.UNAUTHENTICATED.value:
            status = found.get(":status", "none")
            raise RpcError(StatusCode.UNAVAILABLE, f"no gateway answers there: HTTP status {status}", trailing)
        code = StatusCode(int(told))
        if code is not StatusCode.OK:
            raise RpcError(code, urllib.parse.unquote(found.get("grpc-message", "")), trailing)
        if self._buffer:
            raise RpcError(StatusCode.INTERNAL, "the answer ended within a message", trailing)


def read_pair(name: str, value: str) -> tuple[str, str | bytes]:
    if not name.endswith("-bin"):
        return name, value
    try:
        return name, base64.b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        return name, value
