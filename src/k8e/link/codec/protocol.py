"""The agent protocol without I/O: bytes in, frames out. docs/agent-protocol.md is the contract.

A frame that arrives malformed raises ProtocolViolation (the peer erred); a frame that we build wrongly raises
ValueError (we erred).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from k8e.link.codec.frames import (
    Ack,
    AgentHello,
    Data,
    End,
    Eof,
    Frame,
    FrameType,
    Goodbye,
    GoodbyeReason,
    HostHello,
    Opened,
    Order,
    Ping,
    Pong,
    Request,
    Resize,
    Result,
    Side,
    Signal,
)
from k8e.link.errors import Code, ProtocolViolation

MAGIC: Final = 0x4145384B
LOWEST_GENERATION: Final = 1
HIGHEST_GENERATION: Final = 4
PARKING_GENERATION: Final = 2  # the first that knows PARK
BINDING_GENERATION: Final = 3  # and BIND

HEADER_SIZE: Final = 16
NONCE_SIZE: Final = 16
MAX_DATA: Final = 65_536
MAX_REQUEST: Final = 2_097_152
MAX_CONTROL: Final = 65_536
INPUT_WINDOW: Final = 262_144
OUTPUT_WINDOW: Final = 262_144
MIN_WINDOW: Final = 16_384
MAX_WINDOW: Final = 1_048_576
WINDOW_STEP: Final = 4096
MAX_VERSION: Final = 64
EXEC_FIXED: Final = 52
FILE_FIXED: Final = 40
PARK_FIXED: Final = 8

TO_SANDBOX: Final = 0
OUTPUT: Final = 1
ERRORS: Final = 2


_HEADER: Final = struct.Struct("<IBBHQ")
_OFFSET: Final = struct.Struct("<Q")
_HEADER_AND_OFFSET: Final = struct.Struct("<IBBHQQ")
_HOST_HELLO: Final = struct.Struct("<IHH16s")
_AGENT_HELLO: Final = struct.Struct("<IHH16s16s")
_U32: Final = struct.Struct("<I")
_TWO_U32: Final = struct.Struct("<II")
_TWO_U16: Final = struct.Struct("<HH")


class Shape(NamedTuple):
    """The rules for a type of frame, checked before its payload is read."""

    shortest: int
    longest: int
    streams: frozenset[int]
    channel: bool  # concerns one, so its id is not 0


def _shape(shortest: int, longest: int, *streams: int, channel: bool = True) -> Shape:
    return Shape(shortest, longest, frozenset(streams or (0,)), channel)


_FROM_AGENT: Final[dict[int, Shape]] = {
    FrameType.HELLO: _shape(_AGENT_HELLO.size + 1, _AGENT_HELLO.size + MAX_VERSION, channel=False),
    FrameType.PONG: _shape(8, 8, channel=False),
    FrameType.GOODBYE: _shape(4, 4, channel=False),
    FrameType.DATA: _shape(8 + 1, 8 + MAX_DATA, OUTPUT, ERRORS),
    FrameType.EOF: _shape(8, 8, TO_SANDBOX, OUTPUT, ERRORS),
    FrameType.ACK: _shape(8, 8, TO_SANDBOX),
    FrameType.OPENED: _shape(0, MAX_CONTROL),
    FrameType.RESULT: _shape(8, MAX_CONTROL),
}

_FILE_REQUESTS: Final = (
    *(FrameType(number) for number in range(FrameType.READ, FrameType.CONNECT + 1)),
    FrameType.BIND,
)

_FROM_HOST: Final[dict[int, Shape]] = {
    FrameType.HELLO: _shape(_HOST_HELLO.size, _HOST_HELLO.size, channel=False),
    FrameType.PING: _shape(8, 8, channel=False),
    FrameType.EXEC: _shape(EXEC_FIXED, MAX_REQUEST),
    FrameType.ATTACH: _shape(16, 16),
    FrameType.COMMANDS: _shape(0, 0),
    FrameType.PARK: _shape(PARK_FIXED + EXEC_FIXED, MAX_REQUEST),
    **{kind: _shape(FILE_FIXED, MAX_CONTROL) for kind in _FILE_REQUESTS},
    FrameType.DATA: _shape(8 + 1, 8 + MAX_DATA, TO_SANDBOX),
    FrameType.EOF: _shape(8, 8, TO_SANDBOX),
    FrameType.ACK: _shape(8, 8, OUTPUT, ERRORS),
    FrameType.SIGNAL: _shape(8, 8),
    FrameType.END: _shape(4, 4),
    FrameType.RESIZE: _shape(4, 4),
    FrameType.DETACH: _shape(0, 0),
    FrameType.RELEASE: _shape(0, 0),
    FrameType.CANCEL: _shape(0, 0),
}

_DATA: Final = int(FrameType.DATA)
_ORDERS: Final = frozenset({FrameType.DETACH, FrameType.RELEASE, FrameType.CANCEL})


def _frame(kind: FrameType, payload: bytes = b"", channel: int = 0, stream: int = 0) -> bytes:
    return _HEADER.pack(len(payload), kind, stream, 0, channel) + payload


def encode_data_header(channel: int, stream: int, offset: int, length: int) -> bytes:
    """Encodes the header of a DATA frame alone, so that the content is not copied."""
    return _HEADER_AND_OFFSET.pack(length + 8, FrameType.DATA, stream, 0, channel, offset)


def encode(frame: Frame) -> bytes:
    try:
        return _encode(frame)
    except struct.error as error:
        raise ValueError(f"{type(frame).__name__} has a field out of range: {error}") from None


def _encode(frame: Frame) -> bytes:
    match frame:
        case Data(channel, stream, offset, content):
            if not 1 <= len(content) <= MAX_DATA:
                raise ValueError(f"DATA carries 1 to {MAX_DATA} bytes, not {len(content)}")
            return encode_data_header(channel, stream, offset, len(content)) + content
        case Ack(channel, stream, offset):
            return _HEADER_AND_OFFSET.pack(8, FrameType.ACK, stream, 0, channel, offset)
        case Eof(channel, stream, offset):
            return _HEADER_AND_OFFSET.pack(8, FrameType.EOF, stream, 0, channel, offset)
        case Request(channel, kind, payload):
            longest = _FROM_HOST[kind].longest
            if len(payload) > longest:
                raise ValueError(f"{kind.name} is {len(payload)} bytes, the limit is {longest}")
            return _frame(kind, payload, channel)
        case Opened(channel, payload):
            return _frame(FrameType.OPENED, payload, channel)
        case Result(channel, code, errno, payload):
            return _frame(FrameType.RESULT, _TWO_U32.pack(code, errno) + payload, channel)
        case Signal(channel, number, scope):
            return _frame(FrameType.SIGNAL, _TWO_U32.pack(number, scope), channel)
        case End(channel, grace):
            return _frame(FrameType.END, _U32.pack(grace), channel)
        case Resize(channel, rows, columns):
            return _frame(FrameType.RESIZE, _TWO_U16.pack(rows, columns), channel)
        case Order(channel, kind):
            return _frame(kind, b"", channel)
        case Ping(token):
            return _frame(FrameType.PING, _OFFSET.pack(token))
        case Pong(token):
            return _frame(FrameType.PONG, _OFFSET.pack(token))
        case Goodbye(reason):
            return _frame(FrameType.GOODBYE, _U32.pack(reason))
        case HostHello(lowest, highest, nonce):
            return _frame(FrameType.HELLO, _HOST_HELLO.pack(MAGIC, lowest, highest, nonce))
        case AgentHello(generation, nonce, instance, version):
            head = _AGENT_HELLO.pack(MAGIC, generation, 0, nonce, instance)
            return _frame(FrameType.HELLO, head + version.encode("ascii"))


def _decode_hello(sender: Side, payload: bytes) -> HostHello | AgentHello:
    if sender is Side.HOST:
        magic, lowest, highest, nonce = _HOST_HELLO.unpack(payload)
        hello: HostHello | AgentHello = HostHello(lowest, highest, nonce)
    else:
        magic, generation, zero, nonce, instance = _AGENT_HELLO.unpack_from(payload)
        version = payload[_AGENT_HELLO.size :]
        if zero or not (version.isascii() and version.decode("latin-1").isprintable()):
            raise ProtocolViolation("HELLO is malformed")
        hello = AgentHello(generation, nonce, instance, version.decode("ascii"))
    if magic != MAGIC:
        raise ProtocolViolation(f"HELLO has magic {magic:#x}")
    return hello


def _decode_result(channel: int, payload: bytes) -> Result:
    number, errno = _TWO_U32.unpack_from(payload)
    try:
        code = Code(number)
    except ValueError:
        raise ProtocolViolation(f"RESULT has unknown code {number}") from None
    return Result(channel, code, errno, payload[8:])


def _decode(sender: Side, kind: int, stream: int, channel: int, payload: bytes) -> Frame:
    """Every frame but DATA, whose shape has been checked."""
    match kind:
        case FrameType.EOF:
            return Eof(channel, stream, *_OFFSET.unpack(payload))
        case FrameType.ACK:
            return Ack(channel, stream, *_OFFSET.unpack(payload))
        case FrameType.OPENED:
            return Opened(channel, payload)
        case FrameType.RESULT:
            return _decode_result(channel, payload)
        case FrameType.PONG:
            return Pong(*_OFFSET.unpack(payload))
        case FrameType.PING:
            return Ping(*_OFFSET.unpack(payload))
        case FrameType.HELLO:
            return _decode_hello(sender, payload)
        case FrameType.GOODBYE:
            (reason,) = _U32.unpack(payload)
            try:
                return Goodbye(GoodbyeReason(reason))
            except ValueError:
                raise ProtocolViolation(f"GOODBYE has unknown reason {reason}") from None
        case FrameType.SIGNAL:
            return Signal(channel, *_TWO_U32.unpack(payload))
        case FrameType.END:
            return End(channel, *_U32.unpack(payload))
        case FrameType.RESIZE:
            return Resize(channel, *_TWO_U16.unpack(payload))
        case _ if kind in _ORDERS:
            return Order(channel, FrameType(kind))
        case _:
            return Request(channel, FrameType(kind), payload)


class Scratch(threading.local):
    """The buffer into which the readers of a thread receive, all of them the same one: none leaves anything there."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray())

    def of(self, size: int) -> memoryview:
        if len(self.view) < size:
            self.view = memoryview(bytearray(size))
        return self.view[:size]


_SCRATCH: Final = Scratch()


class FrameReader:
    """Turns bytes into frames. What it keeps is less than a frame: a length is judged as soon as its header is there.

    Bytes come either by `feed`, or without a copy through `buffer` and `advance`. Both take all frames out at once and
    give them one by one, so that what precedes a violation is still delivered.

    An idle link keeps nothing: the buffer is its thread's, for the moment between `buffer` and `advance`, in which the
    thread does nothing else. With one of their own, a thousand idle links took 256 MiB.
    """

    def __init__(self, sender: Side, size: int = 256 * 1024) -> None:
        self._sender = sender
        self._shapes = _FROM_AGENT if sender is Side.AGENT else _FROM_HOST
        self._size = max(size, HEADER_SIZE + max(shape.longest for shape in self._shapes.values()))
        self._rest = b""  # of an incomplete frame

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._rest)

    def buffer(self) -> memoryview:
        """Returns the buffer for the next bytes, never empty, to be filled and told to `advance` at once."""
        view = _SCRATCH.of(self._size)
        view[: len(self._rest)] = self._rest
        return view[len(self._rest) :]

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            yield from self.advance(count)

    def advance(self, count: int) -> Iterator[Frame]:
        """The frames that `count` more bytes in the buffer complete."""
        frames: list[Frame] = []
        try:
            self._parse(count, frames)
        except ProtocolViolation as violation:
            # Where the next frame would begin is not known any more: nothing is ever accepted again.
            self._shapes = {}
            self._rest = b""
            return _give(frames, violation)
        return iter(frames)

    def _parse(self, count: int, frames: list[Frame]) -> None:
        view = _SCRATCH.of(self._size)
        end = len(self._rest) + count
        start = 0
        while end - start >= HEADER_SIZE:
            length, kind, stream, zero, channel = _HEADER.unpack_from(view, start)
            shape = self._shapes.get(kind)
            if (
                shape is None
                or zero
                or not shape.shortest <= length <= shape.longest
                or stream not in shape.streams
                or (channel != 0) is not shape.channel
            ):
                raise ProtocolViolation(f"bad header: type {kind}, stream {stream}, {length} bytes, id {channel:#x}")
            content = start + HEADER_SIZE
            after = content + length
            if after > end:
                break
            start = after
            if kind == _DATA:
                offset = _OFFSET.unpack_from(view, content)[0]
                frames.append(Data(channel, stream, offset, bytes(view[content + 8 : after])))
            else:
                frames.append(_decode(self._sender, kind, stream, channel, bytes(view[content:after])))
        self._rest = bytes(view[start:end])


def _give(frames: list[Frame], violation: ProtocolViolation) -> Iterator[Frame]:
    yield from frames
    raise violation
