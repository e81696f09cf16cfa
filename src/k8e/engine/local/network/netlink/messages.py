"""Netlink, as little of it as we need: messages, attributes, a socket that asks and lists, a transaction of netfilter.

nft itself is too slow for what changes while sandboxes run: it reads every set of the table before it changes an
element of one. Encoding is pure; the sockets are the edge. Everything that comes back is the kernel's own.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC = struct.Struct("!BBH")  # netfilter's own header: family, version, resource
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x8000
_TYPE_MASK = 0x3FFF

_NETLINK_NETFILTER = 12
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
CREATE = 0x400
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_RECEIVE = 1 << 17  # what the kernel fills at most is smaller
_SEND_BUFFER = 8 << 20
_SECONDS = 30
_TIMEVAL = struct.Struct("@ll")

NFTABLES, CONNTRACK = 10, 1  # subsystems of netfilter


class NetlinkError(OSError):
    """The kernel refused a message; nothing of its transaction happened."""


class NoSuchThing(NetlinkError):
    """The object of the message is not there."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    body: bytes
    flags: int = 0

    def encode(self, sequence: int, flags: int) -> bytes:
        length = _HEADER.size + len(self.body)
        head = _HEADER.pack(length, self.kind, _REQUEST | self.flags | flags, sequence, 0)
        return head + self.body + bytes(-length % 4)


def netfilter_message(subsystem: int, kind: int, family: int, attributes: bytes, flags: int = 0) -> Message:
    return Message(subsystem << 8 | kind, _GENERIC.pack(family, 0, 0) + attributes, flags)


def _batch_limit(kind: int) -> Message:
    return Message(kind, _GENERIC.pack(socket.AF_UNSPEC, 0, NFTABLES))


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


def netfilter_attributes(body: bytes) -> dict[int, bytes]:
    """Of a message of netfilter's, behind its header."""
    return attributes_of(body[_GENERIC.size :])


def encode_batch(messages: Sequence[Message], sequence: int) -> bytes:
    """One transaction: all of it happens or nothing. Only the last message is acknowledged; those that fail always
    are."""
    parts = [
        message.encode(sequence + number, _ACK if number == len(messages) else 0)
        for number, message in enumerate(messages, 1)
    ]
    begin = _batch_limit(_BATCH_BEGIN).encode(sequence, 0)
    return b"".join((begin, *parts, _batch_limit(_BATCH_END).encode(sequence + len(messages) + 1, 0)))


def read_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, sequence and body of each."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            raise NetlinkError(errno.EPROTO, "an answer that is shorter than its own header")
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += length + -length % 4


class NetlinkSocket:
    """For the network namespace of the thread that opens it, wherever that thread goes afterwards. Blocks while the
    kernel works, usually far less than a millisecond; may be used from any thread."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        # By the kernel: Python's own timeout would poll before each call, and this is on the way of every command.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(_SECONDS, 0))
        self._socket.bind((0, 0))
        self._lock = threading.Lock()
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def request(self, *messages: Message, fine: Collection[int] = ()) -> None:
        """In this order. Raises NetlinkError of the first that failed; the others may have happened. `fine`: errors
        that are none here."""
        with self._lock:
            first, self._sequence = self._sequence + 1, self._sequence + len(messages)
            self._socket.send(b"".join(each.encode(number, _ACK) for number, each in enumerate(messages, first)))
            answers: dict[int, bytes] = {}
            while len(answers) < len(messages):
                for kind, sequence, body in self._receive():
                    if kind == _NLMSG_ERROR and first <= sequence <= self._sequence:
                        answers[sequence] = body
        for _, body in sorted(answers.items()):
            if -struct.unpack_from("=i", body)[0] not in fine:
                _raise_error(body)

    def ask(self, message: Message) -> bytes:
        """The body of the one message of the answer."""
        with self._lock:
            self._sequence += 1
            self._socket.send(message.encode(self._sequence, 0))
            while True:
                for kind, sequence, body in self._receive():
                    if sequence != self._sequence:
                        continue
                    if kind == _NLMSG_ERROR:
                        _raise_error(body)
                    return body

    def dump(self, message: Message) -> list[bytes]:
        """The body of every message of the answer."""
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
                        raise NetlinkError(errno.EPROTO, "an acknowledgement where data was expected")
                    found.append(body)

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        return read_messages(self._socket.recv(_RECEIVE))


class NetfilterSocket(NetlinkSocket):
    def __init__(self) -> None:
        super().__init__(_NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def commit(self, messages: Sequence[Message]) -> None:
        """One transaction. Raises NetlinkError of the first message that failed."""
        if not messages:
            return
        with self._lock:
            first = self._sequence
            self._sequence += len(messages) + 2
            self._socket.send(encode_batch(messages, first))
            self._await_end(first, first + len(messages))

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


def _raise_error(body: bytes) -> None:
    """Unless it is an acknowledgement."""
    code = -struct.unpack_from("=i", body)[0]
    if code == errno.ENOENT:
        raise NoSuchThing(code, os.strerror(code))
    if code:
        raise NetlinkError(code, os.strerror(code))
