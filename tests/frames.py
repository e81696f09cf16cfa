"""The agent protocol spelled a third time, by hand: frames that can also be wrong.

`src/k8e/link` refuses to send what the contract forbids. These tests must send exactly that.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HEADER = struct.Struct("<IBBHQ")
MAGIC = 0x4145384B
OWN = 0xFFFFFFFF

HELLO, PING, PONG, GOODBYE = 1, 2, 3, 4
EXEC, ATTACH, READ, WRITE, LIST, STAT, MKDIR, MOVE, REMOVE, CHMOD, WATCH, CONNECT, COMMANDS, PARK, BIND = range(16, 31)
DATA, EOF, ACK, OPENED, RESULT, SIGNAL, END, RESIZE, DETACH, RELEASE, CANCEL = range(32, 43)
FILE_REQUESTS = (READ, WRITE, LIST, STAT, MKDIR, MOVE, REMOVE, CHMOD, WATCH, CONNECT, BIND)
HOST_FRAMES = (HELLO, PING, EXEC, ATTACH, COMMANDS, PARK, *FILE_REQUESTS, DATA, EOF, ACK, SIGNAL, END, RESIZE, DETACH)


@dataclass(frozen=True, slots=True)
class Frame:
    type: int
    stream: int
    id: int
    payload: bytes


def frame(kind: int, channel: int = 0, payload: bytes = b"", stream: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, stream, 0, channel) + payload


def hello(nonce: bytes, low: int = 4, high: int = 4, magic: int = MAGIC) -> bytes:
    return frame(HELLO, 0, struct.pack("<IHH", magic, low, high) + nonce)


def exec_payload(
    *argv: bytes,
    flags: int = 2,
    uid: int = OWN,
    gid: int = OWN,
    timeout: int = 0,
    grace: int = 100,
    drain: int = 50,
    window: int = 65536,
    cwd: bytes = b"/",
    env: tuple[bytes, ...] = (b"PATH=/usr/bin:/bin",),
) -> bytes:
    fixed = struct.pack(
        "<8I4H2I4x", flags, uid, gid, timeout, grace, drain, window, 0o22, 24, 80, 0, 0, len(argv), len(env)
    )
    return fixed + b"".join(struct.pack("<I", len(text)) + text for text in (cwd, *argv, *env))


def park_payload(*argv: bytes, keep: int = 0, loader: bytes = b"/no/loader.so", **options: Any) -> bytes:
    return struct.pack("<II", keep, len(loader)) + loader + exec_payload(*argv, **{"flags": 0, **options})


def file_payload(
    path: bytes,
    second: bytes = b"",
    *,
    flags: int = 0,
    mode: int = OWN,
    offset: int = 0,
    length: int = 0xFFFFFFFFFFFFFFFF,
    uid: int = OWN,
    gid: int = OWN,
) -> bytes:
    return struct.pack("<4I2Q2I", uid, gid, flags, mode, offset, length, len(path), len(second)) + path + second


class Disconnected(Exception):
    """The agent closed the connection."""


class RawLink:
    """One connection, blocking, with a deadline on every wait."""

    def __init__(self, path: Path, deadline: float = 20.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(deadline)
        self._buffer = b""
        # Through the directory's descriptor: the path itself may be longer than a socket address can be.
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/{path.name}")
        except OSError:
            self.socket.close()
            raise
        finally:
            os.close(folder)

    @classmethod
    def waiting(cls, path: Path, deadline: float = 20.0) -> RawLink:
        """Connects once somebody listens."""
        end = time.monotonic() + deadline
        while True:
            try:
                return cls(path, deadline)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def receive(self) -> Frame:
        header = self._take(HEADER.size)
        length, kind, stream, _, channel = HEADER.unpack(header)
        return Frame(kind, stream, channel, self._take(length))

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                chunk = self.socket.recv(262144)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise Disconnected
            self._buffer += chunk
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def greet(self) -> Frame:
        nonce = secrets.token_bytes(16)
        self.send(hello(nonce))
        answer = self.receive()
        assert answer.type == HELLO, answer
        assert answer.payload[8:24] == nonce
        return answer

    def request(self, kind: int, payload: bytes, channel: int | None = None) -> int:
        channel = secrets.randbits(63) if channel is None else channel
        self.send(frame(kind, channel, payload))
        return channel

    def until(self, kind: int, channel: int) -> Frame:
        """The next such frame of the channel; others are passed over, and output is acknowledged."""
        while True:
            got = self.receive()
            self._acknowledge(got)
            if got.type == kind and got.id == channel:
                return got

    def until_result(self, channel: int) -> bytes:
        """What comes on stream 1 of the channel until its result."""
        content = b""
        while True:
            got = self.receive()
            self._acknowledge(got)
            if got.id == channel and got.type == DATA and got.stream == 1:
                content += got.payload[8:]
            if got.id == channel and got.type == RESULT:
                return content

    def _acknowledge(self, got: Frame) -> None:
        if got.type == DATA:
            offset = struct.unpack_from("<Q", got.payload)[0] + len(got.payload) - 8
            self.send(frame(ACK, got.id, struct.pack("<Q", offset), got.stream))

    def run(self, *argv: bytes) -> int:
        """Runs a command to its end and returns its exit code."""
        channel = self.request(EXEC, exec_payload(*argv))
        result = self.until(RESULT, channel)
        self.send(frame(RELEASE, channel))
        code, _errno, how, _cause, _, value = struct.unpack_from("<IIBBHI", result.payload)
        assert (code, how) == (0, 1), result
        return int(value)
