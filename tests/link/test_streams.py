"""Flow control and offsets of one stream, without a connection."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.link.codec.protocol import INPUT_WINDOW
from k8e.link.errors import BrokenInput, LinkLost, ProtocolViolation
from k8e.link.streams import Inbound, Outbound

WINDOW = 16384


class Acks(list[int]):
    def __call__(self, offset: int) -> None:
        self.append(offset)


def make(start: int = 0) -> tuple[Inbound, Acks]:
    acks = Acks()
    return Inbound(WINDOW, acks, start), acks


async def read(stream: Inbound) -> bytes:
    return await asyncio.wait_for(stream.read(), 5)


async def read_rest(stream: Inbound) -> bytes:
    chunks = []
    while chunk := await read(stream):
        chunks.append(chunk)
    return b"".join(chunks)


async def test_a_quarter_of_the_window_is_acknowledged_when_it_is_consumed() -> None:
    stream, acks = make()
    for offset in range(0, WINDOW, WINDOW // 4):
        stream.receive(offset, bytes(WINDOW // 4))
    assert acks == []
    await read(stream)
    await read(stream)
    assert acks == [WINDOW // 4, WINDOW // 2]


async def test_all_that_waits_is_read_at_once_and_acknowledged_once() -> None:
    stream, acks = make()
    for offset in range(0, WINDOW, WINDOW // 4):
        stream.receive(offset, bytes(WINDOW // 4))
    assert await stream.read_all() == (bytes(WINDOW // 4),) * 4
    assert (acks, stream.queued, stream.position) == ([WINDOW], 0, WINDOW)
    stream.receive(WINDOW, b"more")
    stream.reattach(stream.resume_offset())
    stream.receive(2 * WINDOW, b"after a gap")
    stream.finish(2 * WINDOW + 11)
    assert await stream.read_all() == (b"more",)
    assert stream.dropped == 0
    assert await stream.read_all() == (b"after a gap",)
    assert stream.dropped == WINDOW - 4
    assert await stream.read_all() == ()


async def test_more_than_the_window_is_refused() -> None:
    stream, _ = make()
    stream.receive(0, bytes(WINDOW))
    with pytest.raises(ProtocolViolation):
        stream.receive(WINDOW, b"x")
    assert stream.queued == WINDOW


async def test_consumed_but_unacknowledged_bytes_still_count() -> None:
    stream, acks = make()
    stream.receive(0, bytes(100))
    await read(stream)
    assert acks == []
    with pytest.raises(ProtocolViolation):
        stream.receive(100, bytes(WINDOW))


@pytest.mark.parametrize("offset", [0, 2, 4, 2**64 - 1])
async def test_offsets_neither_jump_nor_go_back(offset: int) -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    with pytest.raises(ProtocolViolation):
        stream.receive(offset, b"x")


async def test_nothing_follows_the_end() -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    stream.finish(3)
    with pytest.raises(ProtocolViolation):
        stream.finish(3)
    with pytest.raises(ProtocolViolation):
        stream.receive(3, b"x")
    assert await read_rest(stream) == b"abc"


@pytest.mark.parametrize("total", [0, 2, 4])
async def test_the_end_is_where_the_bytes_end(total: int) -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    with pytest.raises(ProtocolViolation):
        stream.finish(total)


async def test_a_cancelled_read_loses_nothing() -> None:
    stream, _ = make()
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    stream.receive(0, b"abc")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await read(stream) == b"abc"


async def test_what_came_before_the_failure_is_read_first() -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    stream.fail(LinkLost("gone"))
    assert await read(stream) == b"abc"
    with pytest.raises(LinkLost):
        await read(stream)


async def test_a_window_of_single_bytes_is_a_few_objects() -> None:
    stream, _ = make()
    for offset in range(WINDOW):
        stream.receive(offset, b"x")
    chunks = []
    while stream.queued:
        chunks.append(await read(stream))
    assert b"".join(chunks) == b"x" * WINDOW
    assert len(chunks) <= 5


async def test_a_resumed_stream_goes_on_where_it_was() -> None:
    stream, acks = make()
    stream.receive(0, b"abc")
    assert stream.resume_offset() == 3
    stream.reattach(3)
    stream.receive(3, b"def")
    stream.finish(6)
    assert await read_rest(stream) == b"abcdef"
    assert (stream.position, stream.dropped, acks) == (6, 0, [])


async def test_a_resumed_stream_does_not_go_back() -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    stream.resume_offset()
    with pytest.raises(ProtocolViolation):
        stream.reattach(2)


async def test_dropped_bytes_are_counted_where_they_are_missing() -> None:
    stream, _ = make()
    stream.receive(0, b"abc")
    stream.resume_offset()
    stream.reattach(3)
    stream.receive(3, b"def")
    stream.receive(1000, b"xyz")
    stream.finish(1003)
    assert (stream.position, stream.dropped) == (0, 0)
    assert await read(stream) == b"abcdef"
    assert (stream.position, stream.dropped) == (6, 0)
    assert await read_rest(stream) == b"xyz"
    assert (stream.position, stream.dropped) == (1003, 994)


async def test_an_attachment_jumps_once() -> None:
    stream, _ = make()
    stream.resume_offset()
    stream.reattach(0)
    stream.receive(10, b"x")
    with pytest.raises(ProtocolViolation):
        stream.receive(20, b"x")


async def test_an_attachment_that_starts_later_has_dropped_the_rest() -> None:
    stream, _ = make(start=5)
    stream.reattach(8)
    stream.receive(8, b"x")
    stream.finish(9)
    assert await read_rest(stream) == b"x"
    assert (stream.position, stream.dropped) == (9, 3)


async def test_acknowledgements_never_go_below_what_an_attachment_asked_for() -> None:
    stream, acks = make()
    for offset in range(0, WINDOW, WINDOW // 4):
        stream.receive(offset, bytes(WINDOW // 4))
    stream.reattach(stream.resume_offset())
    for _ in range(4):
        await read(stream)
    assert acks == []
    stream.receive(WINDOW, bytes(WINDOW // 4))
    await read(stream)
    assert acks == [WINDOW + WINDOW // 4]


async def test_however_often_it_is_resumed_at_most_two_windows_wait() -> None:
    stream, _ = make()
    sent = 0
    for _ in range(20):
        sent = stream.resume_offset()
        stream.reattach(sent)
        for _ in range(4):
            stream.receive(sent, bytes(WINDOW // 4))
            sent += WINDOW // 4
        assert stream.queued <= 2 * WINDOW
    stream.finish(sent)
    assert len(await read_rest(stream)) == sent


@given(
    st.lists(
        st.tuples(st.integers(1, WINDOW), st.sampled_from(["data", "read", "read all", "resume", "gap"])), max_size=40
    )
)
def test_position_always_tells_which_byte_comes_next(steps: list[tuple[int, str]]) -> None:
    """Byte n of the stream is n % 251, so a byte at a wrong place is noticed."""

    async def play() -> None:
        stream, _ = make()
        got = 0
        for size, step in steps:
            if step == "data":
                with_room = size - max(0, stream._outstanding + size - WINDOW)
                if with_room > 0:
                    offset = stream.received
                    stream.receive(offset, bytes((offset + index) % 251 for index in range(with_room)))
            elif step.startswith("read") and stream.queued:
                pieces = await stream.read_all() if step == "read all" else (await read(stream),)
                chunk = b"".join(pieces)
                position = stream.position - len(chunk)
                got += len(chunk)
                assert chunk == bytes((position + index) % 251 for index in range(len(chunk)))
            elif step in ("resume", "gap"):
                stream.reattach(stream.resume_offset())
                if step == "gap":
                    stream.receive(stream.received + size, bytes([(stream.received + size) % 251]))
            assert stream.queued <= 2 * WINDOW
        stream.finish(stream.received)
        got += len(await read_rest(stream))
        assert got + stream.dropped == stream.position == stream.total

    asyncio.run(play())


class Pump:
    """Takes what an Outbound gives, as a connection with room would."""

    def __init__(self, stream: Outbound) -> None:
        self.stream = stream
        self.sent: list[tuple[int, bytes]] = []

    def __call__(self) -> None:
        while (piece := self.stream.take()) is not None:
            self.sent.append(piece)

    @property
    def content(self) -> bytes:
        return b"".join(content for _, content in self.sent)


async def test_input_waits_for_the_window() -> None:
    stream = Outbound()
    pump = Pump(stream)
    writing = asyncio.create_task(stream.write(bytes(INPUT_WINDOW + 10), pump))
    await asyncio.sleep(0)
    assert (stream.sent, writing.done()) == (INPUT_WINDOW, False)
    stream.acknowledge(7)
    await asyncio.sleep(0)
    assert (stream.sent, writing.done()) == (INPUT_WINDOW + 7, False)
    stream.acknowledge(100)
    await asyncio.wait_for(writing, 5)
    assert [offset for offset, _ in pump.sent][-1] == INPUT_WINDOW + 7


@pytest.mark.parametrize("offset", [0, 4])
async def test_acknowledgements_neither_go_back_nor_beyond(offset: int) -> None:
    stream = Outbound()
    await stream.write(b"abc", Pump(stream))
    stream.acknowledge(2)
    with pytest.raises(ProtocolViolation):
        stream.acknowledge(offset)


async def test_input_that_nobody_reads_is_an_error() -> None:
    stream = Outbound()
    pump = Pump(stream)
    writing = asyncio.create_task(stream.write(bytes(INPUT_WINDOW + 1), pump))
    await asyncio.sleep(0)
    stream.abort(5)
    with pytest.raises(BrokenInput):
        await writing
    with pytest.raises(BrokenInput):
        await stream.write(b"x", pump)


async def test_nobody_can_have_read_what_was_not_sent() -> None:
    stream = Outbound()
    with pytest.raises(ProtocolViolation):
        stream.abort(1)


@given(st.lists(st.binary(max_size=9000), max_size=8), st.data())
def test_resumed_input_is_complete_wherever_it_broke(pieces: list[bytes], data: st.DataObject) -> None:
    async def play() -> None:
        stream = Outbound()
        pump = Pump(stream)
        arrived = b""
        for piece in pieces:
            await stream.write(piece, pump)
            arrived += pump.content
            pump.sent.clear()
            stream.acknowledge(data.draw(st.integers(stream.acked, len(arrived))))
            if data.draw(st.booleans()):
                arrived = arrived[: data.draw(st.integers(stream.acked, len(arrived)))]
                stream.resume(len(arrived))
                pump()
                assert not pump.sent or pump.sent[0][0] == len(arrived)
                arrived += pump.content
                pump.sent.clear()
            assert stream.queued <= INPUT_WINDOW
        assert arrived == b"".join(pieces)

    asyncio.run(play())


@pytest.mark.parametrize("received", [1, 4])
async def test_resumed_input_begins_where_it_can(received: int) -> None:
    stream = Outbound()
    await stream.write(b"abc", Pump(stream))
    stream.acknowledge(2)
    with pytest.raises(ProtocolViolation):
        stream.resume(received)


class TestKept:
    """The last bytes that were read are never acknowledged."""

    KEEP = WINDOW // 8

    def make(self) -> tuple[Inbound, Acks]:
        acks = Acks()
        return Inbound(WINDOW, acks, 0, self.KEEP), acks

    async def test_what_lies_before_is_acknowledged_in_steps(self) -> None:
        stream, acks = self.make()
        for number in range(10):
            stream.receive(number * self.KEEP, bytes(self.KEEP))
            await read(stream)
        assert acks == [number * self.KEEP for number in range(1, 10)]

    async def test_what_is_kept_counts_as_part_of_the_window(self) -> None:
        stream, acks = self.make()
        for number in range(20):
            stream.receive(number * self.KEEP, bytes(self.KEEP))
            await read(stream)
        stream.receive(20 * self.KEEP, bytes(WINDOW - self.KEEP))
        assert acks[-1] == 19 * self.KEEP
        with pytest.raises(ProtocolViolation):
            stream.receive(20 * self.KEEP + WINDOW - self.KEEP, b"x")

    async def test_nothing_is_acknowledged_within_a_gap(self) -> None:
        """Or bytes that never came would count as kept, and an honest agent as one that sends too much."""
        stream, acks = self.make()
        stream.reattach(0)
        stream.receive(0, bytes(WINDOW // 2))
        await read(stream)
        before = list(acks)
        after_gap = 10 * WINDOW
        stream.receive(after_gap, bytes(self.KEEP // 2))  # what lay between was dropped
        await read(stream)
        assert acks == before
        stream.receive(after_gap + self.KEEP // 2, bytes(self.KEEP // 2))
        await read(stream)
        assert acks == [*before, after_gap]
