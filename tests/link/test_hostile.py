"""An agent that lies. Each time: the exact error, for everybody who waits, with nothing hoarded and no way back."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from k8e.link import AgentLink
from k8e.link.codec.frames import (
    Ack,
    AgentHello,
    Data,
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
    Result,
)
from k8e.link.codec.protocol import MAX_DATA, OUTPUT_WINDOW, encode
from k8e.link.codec.records import Attachment
from k8e.link.command import AgentProcess
from k8e.link.errors import AgentError, Code, LinkLost, LinkTimeout, ProtocolViolation
from k8e.link.model import Entry, ExecSpec, FileType
from tests.link.agent_codec import encode_entry
from tests.link.fake_agent import CALM, HASTY, SPEC, FakeAgent, Stage, ended

OPENED = Attachment(7, False, 0, 0, 0).encode()
NOBODY = 0xBAD


async def start(stage: Stage) -> tuple[AgentLink, FakeAgent, AgentProcess]:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await agent.open(request.id)
    return link, agent, await starting


async def assert_ended_for_all(
    stage: Stage, link: AgentLink, agent: FakeAgent, kind: type[Exception], *waiters: Awaitable[object]
) -> None:
    """The link is over: whoever waits hears it, whoever comes hears it, and nobody dials again."""
    for waiter in waiters:
        with pytest.raises(kind):
            await waiter
    with pytest.raises(kind):
        await link.stat(b"/")
    with pytest.raises(kind):
        await link.start(SPEC)
    assert isinstance(await link.failed(), kind)
    assert link.queued == 0
    assert stage.dialled == 1
    await agent.expect_hangup()


# The handshake


WRONG_HELLOS: dict[str, dict[str, object]] = {
    "nonce": {"nonce": bytes(16)},
    "instance": {"instance": bytes(16)},
    "generation not offered": {"generation": 5},
    "no generation in common": {"generation": 0},
}


@pytest.mark.parametrize("changes", WRONG_HELLOS.values(), ids=WRONG_HELLOS.keys())
async def test_a_wrong_greeting_is_final(stage: Stage, changes: dict[str, object]) -> None:
    opening = stage.begin(stage.open_link())
    agent = await stage.pick_up()
    await agent.greet(**changes)
    with pytest.raises(ProtocolViolation):
        await opening
    await agent.expect_hangup()
    assert stage.dialled == 1


@pytest.mark.parametrize(
    "first", [Pong(0), Opened(1, b""), Data(1, 1, 0, b"x"), Goodbye(GoodbyeReason.NO_COMMON_GENERATION)], ids=repr
)
async def test_nothing_comes_before_the_greeting(stage: Stage, first: Frame) -> None:
    opening = stage.begin(stage.open_link())
    agent = await stage.pick_up()
    await agent.send(first)
    with pytest.raises(ProtocolViolation):
        await opening


async def test_a_second_greeting_is_a_violation(stage: Stage) -> None:
    link, agent = await stage.open()
    assert agent.hello is not None
    await agent.send(AgentHello(1, agent.hello.nonce, bytes(range(16)), "fake"))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation)


async def test_a_frame_that_rides_on_the_greeting_is_a_violation(stage: Stage) -> None:
    opening = stage.begin(stage.open_link())
    agent = await stage.pick_up()
    hello = await agent.expect(HostHello)
    await agent.send(AgentHello(1, hello.nonce, bytes(range(16)), "fake"), Data(1, 1, 0, b"x"))
    try:
        link = await opening
    except ProtocolViolation:
        return
    assert isinstance(await link.failed(), ProtocolViolation)


async def test_silence_instead_of_a_greeting_is_a_timeout(stage: Stage) -> None:
    with pytest.raises(LinkTimeout):
        await stage.open_link(HASTY, deadline=0.15)


async def test_nobody_there_is_said_when_the_deadline_has_passed(stage: Stage) -> None:
    stage.refusing = True
    with pytest.raises(LinkLost, match="refused"):
        await stage.open_link(HASTY, deadline=0.1)
    assert stage.dialled > 1


# Frames


LIES_ABOUT_A_COMMAND: dict[str, Callable[[int], list[Frame]]] = {
    "unknown id": lambda _: [Data(NOBODY, 1, 0, b"x")],
    "RESULT for an unknown id": lambda _: [ended(NOBODY)],
    "OPENED for an unknown id": lambda _: [Opened(NOBODY, OPENED)],
    "OPENED twice": lambda channel: [Opened(channel, OPENED)],
    "offset ahead": lambda channel: [Data(channel, 1, 1, b"x")],
    "offset backwards": lambda channel: [Data(channel, 1, 0, b"abc"), Data(channel, 1, 2, b"x")],
    "offset repeated": lambda channel: [Data(channel, 1, 0, b"abc"), Data(channel, 1, 0, b"abc")],
    "offset at the edge": lambda channel: [Data(channel, 1, 2**64 - 1, b"xx")],
    "EOF ahead": lambda channel: [Eof(channel, 1, 1)],
    "EOF backwards": lambda channel: [Data(channel, 1, 0, b"abc"), Eof(channel, 1, 2)],
    "EOF twice": lambda channel: [Eof(channel, 1, 0), Eof(channel, 1, 0)],
    "DATA after EOF": lambda channel: [Eof(channel, 1, 0), Data(channel, 1, 0, b"x")],
    "ACK beyond sent": lambda channel: [Ack(channel, 0, 1)],
    "EOF of stdin beyond sent": lambda channel: [Eof(channel, 0, 1)],
    "RESULT before EOF": lambda channel: [ended(channel)],
    "RESULT before one EOF": lambda channel: [Eof(channel, 1, 0), ended(channel)],
    "RESULT with other totals": lambda channel: [Eof(channel, 1, 0), Eof(channel, 2, 0), ended(channel, 1)],
    "RESULT twice": lambda channel: [Eof(channel, 1, 0), Eof(channel, 2, 0), ended(channel), ended(channel)],
    "DATA after RESULT": lambda channel: [
        Eof(channel, 1, 0),
        Eof(channel, 2, 0),
        ended(channel),
        Data(channel, 1, 0, b"x"),
    ],
    "RESULT of the wrong size": lambda channel: [
        Eof(channel, 1, 0),
        Eof(channel, 2, 0),
        Result(channel, Code.OK, 0, b""),
    ],
    "refusal of the wrong size": lambda channel: [Result(channel, Code.LOST, 0, b"x")],
    "PONG never asked for": lambda _: [Pong(0)],
    "PONG ahead": lambda _: [Pong(1)],
}


@pytest.mark.parametrize("lie", LIES_ABOUT_A_COMMAND.values(), ids=LIES_ABOUT_A_COMMAND.keys())
async def test_a_lie_ends_the_link_for_everybody(stage: Stage, lie: Callable[[int], list[Frame]]) -> None:
    link, agent, process = await start(stage)
    stating = stage.begin(link.stat(b"/x"))
    await agent.expect(Request)
    await agent.send(*lie(process.id))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, stating)
    # The command itself fails too, unless its result came before the lie.
    if process.channel.result is None:
        with pytest.raises(ProtocolViolation):
            await process.wait()
    if not process.stderr.complete:
        with pytest.raises(ProtocolViolation):
            await process.stderr.read()


async def test_raw_nonsense_ends_the_link(stage: Stage) -> None:
    link, agent, process = await start(stage)
    waiting = stage.begin(process.wait())
    await agent.send_raw(struct.pack("<IBBHQ", 0xFFFF_FFFF, FrameType.DATA, 1, 0, process.id) + bytes(100))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, waiting)


async def test_a_flood_beyond_the_window_ends_the_link_and_is_not_kept(stage: Stage) -> None:
    link, agent, process = await start(stage)
    most = 0
    for offset in range(0, 4 * OUTPUT_WINDOW, MAX_DATA):
        await agent.send(Data(process.id, 1, offset, bytes(MAX_DATA)))
        most = max(most, link.queued)
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, process.wait())
    assert most <= OUTPUT_WINDOW
    assert process.stdout.queued <= OUTPUT_WINDOW


async def test_a_flood_on_one_command_is_not_excused_by_reading_another(stage: Stage) -> None:
    link, agent, process = await start(stage)
    process.stderr.divert(lambda _: None)
    for offset in range(0, OUTPUT_WINDOW, MAX_DATA):
        await agent.send(Data(process.id, 2, offset, bytes(MAX_DATA)), Data(process.id, 1, offset, bytes(MAX_DATA)))
    await agent.send(Data(process.id, 1, OUTPUT_WINDOW, b"x"))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, process.wait())


async def test_half_a_frame_and_silence_is_silence(stage: Stage) -> None:
    link, agent = await stage.open(HASTY)
    stating = stage.begin(link.stat(b"/"))
    await agent.expect(Request)
    await agent.send_raw(encode(Pong(1))[:10])
    with pytest.raises((LinkTimeout, LinkLost)):
        await stating


# Silence


async def test_a_silent_agent_is_asked_and_then_given_up(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, reply=CALM.reply))
    starting = stage.begin(link.start(SPEC))
    await agent.expect(Request)
    await agent.expect(Ping)
    stage.refusing = True
    await agent.expect_hangup()
    with pytest.raises(LinkLost):
        await starting


async def test_an_idle_link_does_not_ask(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, quiet=0.005, reply=CALM.reply))
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    ping = await agent.expect(Ping)
    await agent.send(Pong(ping.token), Result(request.id, Code.NOT_FOUND, 2, b""))
    with pytest.raises(AgentError):
        await stating
    connection = link._mux._connection
    assert connection is not None
    while connection._keepalive is not None:  # its timer ends by itself
        await asyncio.sleep(0.001)
    assert connection._pings == 1


async def test_an_agent_that_answers_pings_and_nothing_else_runs_into_the_deadline(stage: Stage) -> None:
    link, agent = await stage.open(HASTY)
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    orders = []
    while (frame := await agent.receive()) is not None:
        if isinstance(frame, Ping):
            await agent.send(Pong(frame.token))
        else:
            orders.append(frame)
    with pytest.raises(LinkTimeout):
        await stating
    # After CANCEL it might have come to its senses; that it did not is a violation, or such channels would pile up.
    assert orders == [Order(request.id, FrameType.CANCEL)]
    assert isinstance(await link.failed(), ProtocolViolation)


async def test_a_command_that_outlives_its_timeout_is_overdue(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, quiet=100.0, reply=CALM.reply))
    starting = stage.begin(link.start(replace(SPEC, timeout=0.01, grace=0.01)))
    request = await agent.expect(Request)
    await agent.open(request.id)
    process = await starting
    with pytest.raises(LinkTimeout):
        await asyncio.wait_for(process.wait(), 20)


async def test_a_command_that_waits_for_its_reader_is_not_overdue(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, quiet=100.0, reply=CALM.reply, margin=0.02))
    starting = stage.begin(link.start(replace(SPEC, timeout=0.01, grace=0.01)))
    request = await agent.expect(Request)
    await agent.open(request.id)
    process = await starting
    await agent.send(Data(request.id, 1, 0, b"unread"))
    waiting = stage.begin(process.wait())
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    assert await process.stdout.read() == b"unread"
    with pytest.raises(LinkTimeout):
        await waiting


# Goodbye


@pytest.mark.parametrize(
    "reason", [GoodbyeReason.SUPERSEDED, GoodbyeReason.PROTOCOL_ERROR, GoodbyeReason.SHUTTING_DOWN]
)
async def test_goodbye_is_final(stage: Stage, reason: GoodbyeReason) -> None:
    link, agent, process = await start(stage)
    waiting = stage.begin(process.wait())
    await agent.send(Goodbye(reason))
    await assert_ended_for_all(stage, link, agent, LinkLost, waiting)


async def test_another_agent_behind_the_same_name_is_not_taken_for_ours(stage: Stage) -> None:
    link, agent, process = await start(stage)
    waiting = stage.begin(process.wait())
    agent.hang_up()
    imposter = await stage.answer(instance=bytes(16))
    with pytest.raises(ProtocolViolation):
        await waiting
    with pytest.raises(ProtocolViolation):
        await link.stat(b"/")
    await imposter.expect_hangup()
    assert stage.dialled == 2


# Records


ENTRY = Entry(b"name", FileType.FILE, 0o644, 0, 0, 1, 1)


async def begin_listing(stage: Stage, limit: int) -> tuple[AgentLink, FakeAgent, asyncio.Task[list[Entry]], int]:
    link, agent = await stage.open()
    listing = stage.begin(link.list_dir(b"/", limit=limit))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""))
    return link, agent, listing, request.id


async def test_an_endless_listing_is_cut_off_and_the_link_lives(stage: Stage) -> None:
    link, agent, listing, channel = await begin_listing(stage, limit=1000)
    raw = encode_entry(ENTRY) * 500
    offset = 0
    while not listing.done():
        await agent.send(Data(channel, 1, offset, raw))
        offset += len(raw)
        await asyncio.sleep(0)
    with pytest.raises(AgentError) as caught:
        await listing
    assert caught.value.code is Code.TOO_BIG
    while not isinstance(frame := await agent.receive(), Order):
        assert isinstance(frame, Ack)
    assert frame == Order(channel, FrameType.CANCEL)
    assert link.queued == 0
    await agent.send(Data(channel, 1, offset, raw), Result(channel, Code.CANCELED, 0, b""))
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    await agent.send(Result(request.id, Code.OK, 0, encode_entry(replace(ENTRY, name=b""))))
    assert (await stating).type is FileType.FILE


BAD_LISTINGS = {
    "oversize record": struct.pack("<I", 1 << 30),
    "oversize name": struct.pack("<I", 48 + 9000) + bytes(48),
    "nonsense": b"\x20\0\0\0" + bytes(40),
    "half a record": encode_entry(ENTRY)[:-1],
}


@pytest.mark.parametrize("raw", BAD_LISTINGS.values(), ids=BAD_LISTINGS.keys())
async def test_a_bad_record_ends_the_link(stage: Stage, raw: bytes) -> None:
    link, agent, listing, channel = await begin_listing(stage, limit=1000)
    await agent.send(Data(channel, 1, 0, raw), Eof(channel, 1, len(raw)), Result(channel, Code.OK, 0, bytes(8)))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, listing)


async def test_a_listing_that_counts_wrongly_ends_the_link(stage: Stage) -> None:
    link, agent, listing, channel = await begin_listing(stage, limit=1000)
    raw = encode_entry(ENTRY)
    await agent.send(
        Data(channel, 1, 0, raw), Eof(channel, 1, len(raw)), Result(channel, Code.OK, 0, struct.pack("<Q", 2))
    )
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, listing)


async def test_more_content_than_asked_for_ends_the_link(stage: Stage) -> None:
    link, agent = await stage.open()
    reading = stage.begin(link.read_file(b"/x", length=3))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, encode_entry(replace(ENTRY, name=b""))), Data(request.id, 1, 0, b"four"))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, reading)


LIES_ABOUT_A_STAT: dict[str, Callable[[int], Frame]] = {
    "OPENED": lambda channel: Opened(channel, b""),
    "DATA": lambda channel: Data(channel, 1, 0, b"x"),
    "ACK": lambda channel: Ack(channel, 0, 0),
    "no entry": lambda channel: Result(channel, Code.OK, 0, b""),
    "an entry with a name": lambda channel: Result(channel, Code.OK, 0, encode_entry(ENTRY)),
}


@pytest.mark.parametrize("lie", LIES_ABOUT_A_STAT.values(), ids=LIES_ABOUT_A_STAT.keys())
async def test_a_lie_about_a_file_ends_the_link(stage: Stage, lie: Callable[[int], Frame]) -> None:
    link, agent = await stage.open()
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    await agent.send(lie(request.id))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, stating)


@pytest.mark.parametrize(
    "changes", [{"received": 1}, {"stdout_start": 1}, {"stderr_start": 1}], ids=lambda changes: next(iter(changes))
)
async def test_a_new_command_has_no_past(stage: Stage, changes: dict[str, int]) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await agent.open(request.id, **changes)
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, starting)


async def test_a_written_file_is_not_done_before_it_was_sent(stage: Stage) -> None:
    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", bytes(1 << 20)))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""), Result(request.id, Code.OK, 0, bytes(8)))
    await assert_ended_for_all(stage, link, agent, ProtocolViolation, writing)


async def test_an_agent_that_does_not_read_stops_only_its_writers(stage: Stage) -> None:
    link, agent, process = await start(stage)
    writing = stage.begin(process.write(bytes(4 << 20)))
    await agent.send(Data(process.id, 1, 0, b"still here"))
    assert await process.stdout.read() == b"still here"
    assert not writing.done()
    assert link.queued <= 256 * 1024


async def test_hanging_up_again_and_again_does_not_keep_us_busy(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, reply=CALM.reply, stable=100.0, reconnect=0.3))
    starting = stage.begin(link.start(SPEC))
    while not starting.done():
        agent.hang_up()
        answering = stage.begin(stage.answer())
        await asyncio.wait([answering, starting], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            agent = await answering
        else:
            answering.cancel()
    with pytest.raises(LinkLost):
        await starting
    assert stage.dialled < 60


PARKABLE = ExecSpec.of("python3", "-c", "0" * 32)


@pytest.mark.parametrize(
    "answer",
    [
        lambda channel: Opened(channel, OPENED),
        lambda channel: Data(channel, 1, 0, b"x"),
        lambda channel: Result(channel, Code.OK, 0, b"more"),
    ],
    ids=["OPENED", "DATA", "RESULT with more"],
)
async def test_parking_is_answered_by_a_bare_result_or_the_link_ends(
    stage: Stage, answer: Callable[[int], Frame]
) -> None:
    link, agent = await stage.open(generation=2)
    parking = stage.begin(link.park(PARKABLE, b"/loader.so"))
    request = await agent.expect(Request)
    await agent.send(answer(request.id))
    with pytest.raises(ProtocolViolation):
        await parking


async def test_a_command_that_was_not_to_be_handed_over_was_not(stage: Stage) -> None:
    link, agent = await stage.open(generation=2)
    starting = stage.begin(link.start(PARKABLE))
    request = await agent.expect(Request)
    await agent.open(request.id, handed_over=True)
    with pytest.raises(ProtocolViolation, match="handed over"):
        await starting
