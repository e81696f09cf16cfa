"""HTTP/2 with TLS to one server, by h2. A thread reads the connection; TLS and h2 are used under one lock."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

CONNECT = 20.0  # seconds
WINDOW = 4 << 20  # bytes that the server may send before they are taken
SEGMENT = 256 << 10
FRAME_HEADER = 9
INTERRUPTED = 0.2 if os.name == "nt" else 3600.0  # seconds of a wait: on Windows Ctrl-C is heeded between two waits


class Broken(Exception):
    """The connection or the stream has ended before its time."""


@dataclass(frozen=True, slots=True)
class Credentials:
    roots: bytes | None  # None: the system's
    key: bytes = field(repr=False)
    certificate: bytes

    def make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if self.roots is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=self.roots.decode("ascii", "replace"))
        if self.certificate and self.key:
            # Python reads a key from a file only; this one is its user's alone, and gone at once.
            descriptor, path = tempfile.mkstemp(prefix="k8e-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.certificate + b"\n" + self.key)
                context.load_cert_chain(path)
            finally:
                os.unlink(path)
        return context


class Stream:
    """One request and its answer."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self.number = connection, number
        self.headers: list[tuple[str, str]] = []
        self.ended = False
        self.pieces: queue.SimpleQueue[bytes | Broken] = queue.SimpleQueue()

    def send(self, content: bytes, deadline: float | None) -> None:
        self._connection.send(self, content, deadline)

    def end_sending(self) -> None:
        self._connection.finish(self)

    def cancel(self) -> None:
        self._connection.cancel(self)

    def receive(self, deadline: float | None) -> bytes:
        """The next piece; empty at the end, when `headers` has the last ones, too."""
        piece = self._wait(deadline)
        if isinstance(piece, Broken):
            raise piece
        if piece:
            self._connection.acknowledge(self, len(piece))
        return piece

    def _wait(self, deadline: float | None) -> bytes | Broken:
        while True:
            left = INTERRUPTED if deadline is None else min(max(deadline - time.monotonic(), 0), INTERRUPTED)
            try:
                return self.pieces.get(timeout=left)
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None


class Connection:
    def __init__(self, target: str, credentials: Credentials, keepalive: float, patience: float) -> None:
        host, _, port = target.rpartition(":")
        self._host = host.removeprefix("[").removesuffix("]")
        self._keepalive, self._patience = keepalive, patience
        self._streams: dict[int, Stream] = {}
        self._changed = threading.Condition()  # its lock guards TLS, h2 and the streams
        self.ended = ""
        self.is_closing = False  # it takes no more calls
        self._frames = bytearray()  # received, and not yet whole
        try:
            self._socket = socket.create_connection((self._host, int(port)), CONNECT)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = credentials.make_context()
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=self._host)
            self._shake_hands()
        except (OSError, ValueError) as error:
            raise Broken(f"failed to connect to {target}: {error}") from error
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings.initial_window_size = WINDOW
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        with self._changed:
            self._flush()
        self._socket.settimeout(keepalive)
        threading.Thread(target=self._read, daemon=True).start()

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                self._socket.sendall(self._outgoing.read())
                return
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                received = self._socket.recv(SEGMENT)
                if not received:
                    raise OSError("it closed the connection during the handshake") from None
                self._incoming.write(received)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._tls.write(data)
        if encrypted := self._outgoing.read():
            try:
                self._socket.sendall(encrypted)
            except TimeoutError:  # a part may have been sent: there is no going on
                raise OSError("the gateway takes nothing any more") from None

    # Sending

    def open(self, headers: list[tuple[str, str]]) -> Stream:
        with self._guarded():
            stream = Stream(self, self._h2.get_next_available_stream_id())
            self._streams[stream.number] = stream
            self._h2.send_headers(stream.number, headers)
            self._flush()
            return stream

    def send(self, stream: Stream, content: bytes, deadline: float | None) -> None:
        rest = memoryview(content)
        while rest:
            with self._guarded():
                while (room := self._room(stream)) <= 0:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError
                    self._changed.wait(left)
                size = min(room, self._h2.max_outbound_frame_size, len(rest))
                self._h2.send_data(stream.number, bytes(rest[:size]))
                rest = rest[size:]
                self._flush()

    def _room(self, stream: Stream) -> int:
        if stream.ended or self.ended:
            raise Broken(self.ended or "the call has ended")
        return self._h2.local_flow_control_window(stream.number)

    def finish(self, stream: Stream) -> None:
        with self._guarded():
            if not stream.ended:
                self._h2.end_stream(stream.number)
                self._flush()

    def cancel(self, stream: Stream) -> None:
        with contextlib.suppress(Broken), self._guarded():
            if not stream.ended:
                self._h2.reset_stream(stream.number, 8)  # CANCEL
                self._end(stream, Broken("the call was cancelled"))
                self._flush()

    def acknowledge(self, stream: Stream, size: int) -> None:
        with contextlib.suppress(Broken), self._guarded():
            self._h2.increment_flow_control_window(size)
            if not stream.ended:
                self._h2.increment_flow_control_window(size, stream.number)
            self._flush()

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        with self._changed:
            if self.ended:
                raise Broken(self.ended)
            try:
                yield
            except (OSError, h2.exceptions.ProtocolError) as error:
                if isinstance(error, TimeoutError) and not self.ended:
                    raise
                self._break(f"the connection broke: {error}")
                raise Broken(self.ended) from error

    def close(self) -> None:
        with self._changed:
            self._break("the connection was closed")

    # Receiving

    def _read(self) -> None:
        silent = False
        while not self.ended:
            try:
                received = self._socket.recv(SEGMENT)
            except TimeoutError:
                if silent or not self._ping():
                    return self._give_up("the gateway is silent: it answers no ping")
                silent = True
                continue
            except OSError as error:
                return self._give_up(f"the connection broke: {error}")
            if not received:
                return self._give_up("the gateway closed the connection")
            if silent:
                self._socket.settimeout(self._keepalive)
            silent = False
            with self._changed:
                try:
                    self._take(received)
                except (OSError, h2.exceptions.ProtocolError) as error:
                    return self._break(f"the connection broke: {error}")
        return None

    def _ping(self) -> bool:
        try:
            with self._guarded():
                self._h2.ping(b"k8e-ping")
                self._flush()
        except (Broken, TimeoutError):
            return False
        self._socket.settimeout(self._patience)
        return True

    def _take(self, received: bytes) -> None:
        self._incoming.write(received)
        while True:
            try:
                plain = self._tls.read(SEGMENT)
            except ssl.SSLWantReadError:
                break
            if not plain:
                break
            self._frames += plain
        while (frame := self._take_frame()) is not None:
            for event in self._h2.receive_data(frame):
                self._handle(event)
        self._flush()
        self._changed.notify_all()

    def _take_frame(self) -> bytes | None:
        """One after the other: what one says about the connection holds for the next."""
        size = FRAME_HEADER + int.from_bytes(self._frames[:3], "big")
        if len(self._frames) < max(size, FRAME_HEADER):
            return None
        frame = bytes(self._frames[:size])
        del self._frames[:size]
        return frame

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            if event.error_code != h2.errors.ErrorCodes.NO_ERROR:
                return self._break("the gateway ended the connection")
            # It takes no more calls and finishes those that it has; h2 would refuse their frames from now on.
            self.is_closing = True
            self._h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
            return None
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        if stream is None:
            return None
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            stream.headers += [(as_text(name), as_text(value)) for name, value in event.headers or ()]
        elif isinstance(event, h2.events.DataReceived):
            if event.data:
                stream.pieces.put(event.data)
        elif isinstance(event, h2.events.StreamEnded):
            self._end(stream, b"")
        elif isinstance(event, h2.events.StreamReset):
            self._end(stream, Broken(f"the gateway broke the call off: {event.error_code}"))
        return None

    def _end(self, stream: Stream, last: bytes | Broken) -> None:
        stream.ended = True
        stream.pieces.put(last)
        self._streams.pop(stream.number, None)
        self._changed.notify_all()

    def _give_up(self, cause: str) -> None:
        with self._changed:
            self._break(cause)

    def _break(self, cause: str) -> None:
        if not self.ended:
            self.ended = cause
            for stream in list(self._streams.values()):
                self._end(stream, Broken(cause))
            self._socket.close()
        self._changed.notify_all()


def as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
