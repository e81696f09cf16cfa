"""Netfilter's netlink, as little of it as we need: attributes, one transaction, one dump.

nft itself is too slow for what changes while sandboxes run: it reads every set of the table before it changes an
element of one. Encoding is pure; `NetfilterSocket` is the edge. Everything that comes back is the kernel's own.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC = struct.Struct("!BBH")  # family, version, resource
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x8000
_TYPE_MASK = 0x3FFF

_NETLINK_NETFILTER = 12
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _MULTI, _ACK, _DUMP = 0x1, 0x2, 0x4, 0x300
CREATE = 0x400
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_RECEIVE = 1 << 17  # what the kernel fills at most is smaller
_SEND_BUFFER = 8 << 20
_SECONDS = 30.0

NFTABLES, CONNTRACK = 10, 1  # subsystems


class NetlinkError(OSError):
    """The kernel refused a message; nothing of its transaction happened."""


class NoSuchThing(NetlinkError):
    """What it was about is not there."""


@dataclass(frozen=True, slots=True)
class Message:
    subsystem: int
    kind: int
    family: int
    attributes: bytes
    flags: int = 0

    def encode(self, sequence: int, flags: int, resource: int = 0) -> bytes:
        body = _GENERIC.pack(self.family, 0, resource) + self.attributes
        kind = self.subsystem << 8 | self.kind
        return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | self.flags | flags, sequence, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(payload), kind) + payload + bytes(-len(payload) % 4)


def nested(kind: int, *children: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(children))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def parse_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += length + -length % 4


def attributes_of(data: bytes) -> dict[int, bytes]:
    """Where each kind is there once."""
    return dict(parse_attributes(data))


def encode_batch(messages: Sequence[Message], sequence: int) -> bytes:
    """One transaction: all of it happens or nothing. Only the last message is acknowledged; those that fail always
    are."""
    begin = Message(0, _BATCH_BEGIN, socket.AF_UNSPEC, b"").encode(sequence, 0, NFTABLES)
    end = Message(0, _BATCH_END, socket.AF_UNSPEC, b"").encode(sequence + len(messages) + 1, 0, NFTABLES)
    parts = [
        message.encode(sequence + number, _ACK if number == len(messages) else 0)
        for number, message in enumerate(messages, 1)
    ]
    return b"".join((begin, *parts, end))


def read_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, sequence and body of each."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            raise NetlinkError(errno.EPROTO, "an answer that is shorter than its own header")
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += length + -length % 4


class NetfilterSocket:
    """For the network namespace of whoever opens it. Blocks for as long as the kernel needs, usually far less than a
    millisecond; may be used from any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._socket.settimeout(_SECONDS)
        self._socket.bind((0, 0))
        self._lock = threading.Lock()
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def commit(self, messages: Sequence[Message]) -> None:
        """Raises NetlinkError of the first message that failed."""
        if not messages:
            return
        with self._lock:
            first = self._sequence
            self._sequence += len(messages) + 2
            self._socket.send(encode_batch(messages, first))
            self._await_end(first, first + len(messages))

    def request(self, message: Message) -> None:
        """One message of a subsystem without transactions."""
        with self._lock:
            self._sequence += 1
            self._socket.send(message.encode(self._sequence, _ACK))
            self._await_end(self._sequence, self._sequence)

    def dump(self, message: Message) -> list[bytes]:
        """The attributes of every message of the answer."""
        with self._lock:
            self._sequence += 1
            self._socket.send(message.encode(self._sequence, _DUMP))
            found: list[bytes] = []
            while True:
                for kind, sequence, body in self._receive():
                    if sequence != self._sequence:
                        continue
                    if kind == _NLMSG_DONE:
                        return found
                    if kind == _NLMSG_ERROR:
                        _raise_error(body)
                    found.append(body[_GENERIC.size :])

    def _await_end(self, first: int, last: int) -> None:
        failure: bytes | None = None
        while True:
            for kind, sequence, body in self._receive():
                if kind != _NLMSG_ERROR or not first <= sequence <= last:
                    continue
                if struct.unpack_from("=i", body)[0] != 0 and failure is None:
                    failure = body
                if sequence == last or (failure is not None and sequence == first):
                    if failure is not None:
                        _raise_error(failure)
                    return

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        return read_messages(self._socket.recv(_RECEIVE))


def _raise_error(body: bytes) -> None:
    code = -struct.unpack_from("=i", body)[0]
    if code == errno.ENOENT:
        raise NoSuchThing(code, os.strerror(code))
    if code:
        raise NetlinkError(code, os.strerror(code))
    raise NetlinkError(errno.EPROTO, "an acknowledgement where data was expected")
