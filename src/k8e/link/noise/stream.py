"""The encrypted stream under a link's connection: an asyncio protocol towards the socket, a transport towards the
connection, which reads and writes as over a plain socket.

A record is a length (u16) and so many bytes that one nonce sealed. The first record of the gateway is short, because an
agent gives a stranger no more memory than that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidTag

from k8e.link.codec.protocol import Scratch
from k8e.link.errors import LinkLost
from k8e.link.noise.handshake import MESSAGE_LIMIT, TAG_SIZE, TEXT_LIMIT, CipherState, NoncesExhausted

PREFIX: Final = struct.Struct("<H")
FIRST_LIMIT: Final = 256 - TAG_SIZE
_BUFFER: Final = 4 * (PREFIX.size + MESSAGE_LIMIT)
_SCRATCH: Final = Scratch()


@dataclass(frozen=True, slots=True)
class SealedStream:
    """A connected socket with the ciphers that a handshake has agreed on."""

    socket: socket.socket
    sealing: CipherState
    opening: CipherState

    def carry(self, inner: asyncio.BufferedProtocol) -> SealedProtocol:
        """Returns the protocol for the socket, which hands opened bytes to `inner`."""
        return SealedProtocol(inner, self.sealing, self.opening)


def seal_records(cipher: CipherState, content: bytes) -> Iterator[bytes]:
    view, at = memoryview(content), 0
    while at < len(view):
        part = view[at : at + (FIRST_LIMIT if cipher.fresh else TEXT_LIMIT)]
        yield PREFIX.pack(len(part) + TAG_SIZE)
        yield cipher.seal(part)
        at += len(part)


class RecordReader:
    """Opens records. What it keeps is less than one: bytes come through a buffer that all readers of a thread share, as
    those of FrameReader do."""

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._rest = b""

    def buffer(self) -> memoryview:
        view = _SCRATCH.of(_BUFFER)
        view[: len(self._rest)] = self._rest
        return view[len(self._rest) :]

    def advance(self, count: int) -> Iterator[bytes]:
        """Gives the content of the records that `count` more bytes complete, then raises LinkLost for a fault."""
        view = _SCRATCH.of(_BUFFER)
        end, start = len(self._rest) + count, 0
        texts: list[bytes] = []
        try:
            while end - start >= PREFIX.size:
                (length,) = PREFIX.unpack_from(view, start)
                if length <= TAG_SIZE:
                    raise InvalidTag  # nothing is sealed without content
                if end - start < PREFIX.size + length:
                    break
                texts.append(self._cipher.open(view[start + PREFIX.size : start + PREFIX.size + length]))
                start += PREFIX.size + length
        except (InvalidTag, NoncesExhausted) as error:
            self._rest = b""
            return _give(texts, LinkLost(f"the encrypted stream is broken: {type(error).__name__}"))
        self._rest = bytes(view[start:end])
        return iter((b"".join(texts),) if texts else ())


def _give(texts: list[bytes], failure: LinkLost) -> Iterator[bytes]:
    yield from texts
    raise failure


class SealedProtocol(asyncio.BufferedProtocol):
    def __init__(self, inner: asyncio.BufferedProtocol, sealing: CipherState, opening: CipherState) -> None:
        self._inner = inner
        self._sealing = sealing
        self._reader = RecordReader(opening)
        self._outer: asyncio.Transport | None = None
        self._broken: LinkLost | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._outer = transport
        self._inner.connection_made(SealedTransport(transport, self._sealing))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        assert self._outer is not None
        try:
            for text in self._reader.advance(nbytes):
                self._deliver(text)
        except LinkLost as error:
            self._broken = error
            self._outer.abort()

    def _deliver(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest and self._outer is not None and not self._outer.is_closing():
            room = memoryview(self._inner.get_buffer(len(rest)))
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            self._inner.buffer_updated(count)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(self._broken or exc)


class SealedTransport(asyncio.Transport):
    """As much of a transport as a link's connection uses."""

    def __init__(self, outer: asyncio.Transport, cipher: CipherState) -> None:
        super().__init__()
        self._outer = outer
        self._cipher = cipher

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        try:
            self._outer.write(b"".join(seal_records(self._cipher, bytes(data))))
        except NoncesExhausted:
            self._outer.abort()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._outer.is_closing()

    def close(self) -> None:
        self._outer.close()

    def abort(self) -> None:
        self._outer.abort()
