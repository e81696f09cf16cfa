"""The codec: what goes in comes out, wherever it is cut; what is wrong is refused before it costs anything."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.link.codec import frames as f
from k8e.link.codec.frames import FrameType, Side
from k8e.link.codec.protocol import HEADER_SIZE, MAX_CONTROL, MAX_DATA, FrameReader, encode, encode_data_header
from k8e.link.errors import ProtocolViolation
from tests.link.strategies import agent_frames, host_frames

LARGEST = HEADER_SIZE + 8 + MAX_DATA
cuts = st.lists(st.integers(1, 70_000), max_size=30)


def header(length: int, kind: int, stream: int = 0, zero: int = 0, channel: int = 1) -> bytes:
    return struct.pack("<IBBHQ", length, kind, stream, zero, channel)


def feed_in_pieces(reader: FrameReader, data: bytes, sizes: list[int]) -> list[f.Frame]:
    got: list[f.Frame] = []
    for size in [*sizes, len(data)]:
        got += reader.feed(data[:size])
        data = data[size:]
    return got


@given(st.lists(agent_frames, max_size=8), cuts)
def test_frames_of_an_agent_survive_any_split(frames: list[f.Frame], sizes: list[int]) -> None:
    got = feed_in_pieces(FrameReader(Side.AGENT), b"".join(map(encode, frames)), sizes)
    assert got == frames
    assert [type(frame) for frame in got] == [type(frame) for frame in frames]


@given(st.lists(host_frames, max_size=8), cuts)
def test_frames_of_a_host_survive_any_split(frames: list[f.Frame], sizes: list[int]) -> None:
    got = feed_in_pieces(FrameReader(Side.HOST), b"".join(map(encode, frames)), sizes)
    assert got == frames
    assert [type(frame) for frame in got] == [type(frame) for frame in frames]


def test_frames_survive_byte_by_byte() -> None:
    frames: list[f.Frame] = [f.Data(1, 1, 0, b"abc"), f.Ack(2, 0, 9), f.Opened(3, b""), f.Pong(4)]
    reader = FrameReader(Side.AGENT)
    raw = b"".join(encode(frame) for frame in frames)
    assert [frame for byte in raw for frame in reader.feed(bytes([byte]))] == frames


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_random_bytes_are_refused_and_never_hoarded(pieces: list[bytes]) -> None:
    reader = FrameReader(Side.AGENT)
    for piece in pieces:
        try:
            list(reader.feed(piece))
        except ProtocolViolation:
            return
        assert reader.buffered < LARGEST


@given(st.lists(agent_frames, min_size=1, max_size=4), st.data())
def test_mutated_frames_are_refused_or_read(frames: list[f.Frame], data: st.DataObject) -> None:
    raw = bytearray(b"".join(map(encode, frames)))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    reader = FrameReader(Side.AGENT)
    try:
        list(reader.feed(bytes(raw)))
    except ProtocolViolation:
        return
    assert reader.buffered < LARGEST


BAD_HEADERS = {
    "length beyond every frame": header(0xFFFF_FFFF, FrameType.DATA, 1),
    "content beyond MAX_DATA": header(8 + MAX_DATA + 1, FrameType.DATA, 1),
    "control beyond MAX_CONTROL": header(MAX_CONTROL + 1, FrameType.RESULT),
    "DATA without content": header(8, FrameType.DATA, 1),
    "short ACK": header(7, FrameType.ACK),
    "long EOF": header(9, FrameType.EOF, 1),
    "RESULT without code": header(7, FrameType.RESULT),
    "unknown type": header(8, 99),
    "type 0": header(8, 0),
    "reserved bytes": header(9, FrameType.DATA, 1, zero=1),
    "stream 3": header(9, FrameType.DATA, 3),
    "DATA into the sandbox": header(9, FrameType.DATA, 0),
    "ACK of output": header(8, FrameType.ACK, 1),
    "OPENED on a stream": header(32, FrameType.OPENED, 1),
    "channel frame without a channel": header(9, FrameType.DATA, 1, channel=0),
    "PONG for a channel": header(8, FrameType.PONG),
    "a host's PING": header(8, FrameType.PING, channel=0),
    "a host's EXEC": header(52, FrameType.EXEC),
    "a host's CANCEL": header(0, FrameType.CANCEL),
    "HELLO without version": header(40, FrameType.HELLO, channel=0),
    "HELLO with an endless version": header(105, FrameType.HELLO, channel=0),
}


@pytest.mark.parametrize("raw", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_bad_header_is_refused_before_its_payload_comes(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        list(FrameReader(Side.AGENT).feed(raw))


BAD_PAYLOADS = {
    "unknown code": header(8, FrameType.RESULT) + struct.pack("<II", 29, 0),
    "unknown farewell": header(4, FrameType.GOODBYE, channel=0) + struct.pack("<I", 5),
    "wrong magic": header(41, FrameType.HELLO, channel=0) + bytes(40) + b"1",
    "version with a control byte": encode(f.AgentHello(1, bytes(16), bytes(16), "\x1b")),
    "version that is not ASCII": encode(f.AgentHello(1, bytes(16), bytes(16), "1"))[:-1] + b"\xe9",
}


@pytest.mark.parametrize("raw", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS.keys())
def test_a_bad_payload_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        list(FrameReader(Side.AGENT).feed(raw))


def test_what_precedes_a_violation_is_delivered_and_nothing_after_it() -> None:
    reader = FrameReader(Side.AGENT)
    good = encode(f.Pong(1))
    got = []
    with pytest.raises(ProtocolViolation):
        for frame in reader.feed(good + header(8, 99) + good):
            got.append(frame)
    assert got == [f.Pong(1)]
    with pytest.raises(ProtocolViolation):
        list(reader.feed(good))


def test_a_frame_of_the_largest_size_fits_whatever_is_in_the_buffer() -> None:
    reader = FrameReader(Side.AGENT, size=0)
    largest = f.Data(1, 1, 0, bytes(MAX_DATA))
    assert list(reader.feed(encode(largest) * 3)) == [largest] * 3


def test_the_buffer_can_be_filled_in_place() -> None:
    reader = FrameReader(Side.AGENT)
    raw = encode(f.Data(1, 2, 5, b"xyz"))
    reader.buffer()[:10] = raw[:10]
    assert list(reader.advance(10)) == []
    reader.buffer()[: len(raw) - 10] = raw[10:]
    assert list(reader.advance(len(raw) - 10)) == [f.Data(1, 2, 5, b"xyz")]
    assert reader.buffered == 0


@pytest.mark.parametrize(
    "frame",
    [
        f.Data(1, 1, 0, b""),
        f.Data(1, 1, 0, bytes(MAX_DATA + 1)),
        f.Data(1, 1, -1, b"x"),
        f.Ack(2**64, 1, 0),
        f.Ping(-1),
        f.Request(1, FrameType.STAT, bytes(MAX_CONTROL + 1)),
        f.End(1, 2**32),
    ],
)
def test_our_own_mistakes_are_not_the_peers(frame: f.Frame) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(frame)


def test_a_data_header_is_the_beginning_of_its_frame() -> None:
    assert encode_data_header(5, 0, 7, 3) + b"abc" == encode(f.Data(5, 0, 7, b"abc"))


def test_an_idle_reader_keeps_no_buffer_and_readers_share_one() -> None:
    whole = encode(f.Data(7, 1, 0, b"x" * 40_000))
    list(FrameReader(Side.AGENT).feed(whole))
    tracemalloc.start()
    try:
        readers = [FrameReader(Side.AGENT) for _ in range(100)]
        for reader in readers:
            assert [encode(frame) for frame in reader.feed(whole)] == [whole]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1000 * len(readers)


def test_halves_of_frames_that_arrive_in_turn_are_put_together() -> None:
    wholes = [encode(f.Data(7, 1, 0, bytes([number]) * 1000)) for number in range(3)]
    readers = [FrameReader(Side.AGENT) for _ in wholes]
    for reader, whole in zip(readers, wholes, strict=True):
        assert list(reader.feed(whole[:500])) == []
    for reader, whole in zip(readers, wholes, strict=True):
        assert reader.buffered == 500
        (frame,) = reader.feed(whole[500:])
        assert encode(frame) == whole
        assert reader.buffered == 0
