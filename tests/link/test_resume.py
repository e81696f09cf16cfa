"""Lost connections: what is resumed, what is repeated, what is given up; and exactly which frames that takes."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field, replace

import pytest

from k8e.link import AgentLink
from k8e.link.codec.frames import (
    Ack,
    Data,
    End,
    Eof,
    Frame,
    FrameType,
    Opened,
    Order,
    Ping,
    Pong,
    Request,
    Resize,
    Result,
    Signal,
)
from k8e.link.codec.protocol import MAX_DATA, OUTPUT_WINDOW
from k8e.link.codec.records import Attachment
from k8e.link.command import AgentProcess
from k8e.link.errors import AgentError, BrokenInput, Code, LinkLost, NotStarted
from k8e.link.model import Entry, FileType, TerminalSize
from tests.link.agent_codec import decode_attach, decode_exec
from tests.link.fake_agent import CALM, HASTY, SPEC, FakeAgent, Stage, ended

STDIN, STDOUT, STDERR = b"to be read", b"0123456789", b"errors"
FILE = Entry(b"", FileType.FILE, 0o644, 0, 0, 10, 1)


class Cut(Exception):
    """The connection breaks here."""


@dataclass
class Playing:
    """A command that reads STDIN, writes STDOUT and STDERR, and exits with 3; over as many connections as it takes.

    The connection breaks after the `cut`th frame from the agent, or before the first.
    """

    cut: int
    executed: list[Request] = field(default_factory=list)
    attached: list[tuple[int, int]] = field(default_factory=list)
    stdin: bytes = b""
    stdin_ended: bool = False
    finished: bool = False
    sent: int = 0
    delivered: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})

    async def play(self, agent: FakeAgent) -> None:
        """One connection."""
        request = await agent.expect(Request)
        if request.type is FrameType.ATTACH:
            self.attached.append(decode_attach(request.payload))
            assert self.attached[-1] == (self.delivered[1], self.delivered[2])
            if not self.executed:
                await self.send(agent, Result(request.id, Code.UNKNOWN_COMMAND, 0, b""))
                request = await agent.expect(Request)
        if request.type is FrameType.EXEC:
            if self.cut == 0 and not self.attached:
                self.cut = -1
                raise Cut
            assert decode_exec(request.payload) == SPEC
            self.executed.append(request)
        channel = request.id
        starts = (self.delivered[1], self.delivered[2])
        await self.send(agent, Opened(channel, Attachment(7, False, len(self.stdin), *starts).encode()))
        while not self.stdin_ended:
            frame = await agent.receive()
            if isinstance(frame, Data):
                assert frame.offset == len(self.stdin)
                self.stdin += frame.content
                await self.send(agent, Ack(channel, 0, len(self.stdin)))
            else:
                assert frame == Eof(channel, 0, len(self.stdin))
                self.stdin_ended = True
        for stream, content in ((1, STDOUT), (2, STDERR)):
            for offset in range(starts[stream - 1], len(content), 5):
                piece = content[offset : offset + 5]
                self.delivered[stream] = offset + len(piece)
                await self.send(agent, Data(channel, stream, offset, piece))
            await self.send(agent, Eof(channel, stream, len(content)))
        self.finished = True
        await self.send(agent, ended(channel, len(STDOUT), len(STDERR), 3))

    async def send(self, agent: FakeAgent, frame: Frame) -> None:
        await agent.send(frame)
        self.sent += 1
        if self.sent == self.cut:
            raise Cut


@pytest.mark.parametrize("cut", range(10))
async def test_a_command_is_run_once_and_exactly_wherever_the_connection_breaks(stage: Stage, cut: int) -> None:
    link, agent = await stage.open()
    running = stage.begin(link.run(SPEC, STDIN))
    command = Playing(cut)
    while True:
        try:
            await command.play(agent)
            break
        except Cut:
            agent.hang_up()
            agent = await stage.answer()
            if command.finished:  # that was the result: nothing is left to resume
                break
    done = await running
    assert (done.outcome.exit_code, done.stdout, done.stderr) == (3, STDOUT, STDERR)
    assert command.stdin == STDIN
    assert len(command.executed) == 1
    channel = command.executed[0].id
    while (frame := await agent.receive()) != Order(channel, FrameType.RELEASE):
        assert isinstance(frame, Request | Eof | Ack), frame


async def start(stage: Stage, link: AgentLink, agent: FakeAgent) -> AgentProcess:
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await agent.open(request.id)
    return await starting


# Starting


async def test_an_exec_that_did_not_arrive_is_sent_again(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(request.id, 0, 0)
    await agent.send(Result(request.id, Code.UNKNOWN_COMMAND, 0, b""))
    assert await agent.expect(Request) == request
    await agent.open(request.id)
    assert (await starting).id == request.id


async def test_an_exec_that_did_arrive_is_not_sent_again(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(request.id, 0, 0)
    await agent.open(request.id, ended=True)
    process = await starting
    await agent.finish(process.id, b"out")
    assert await process.stdout.read() == b"out"
    assert (await process.wait()).exit_code == 0
    await agent.expect_order(FrameType.RELEASE, process.id)


async def test_a_refused_exec_is_refused_over_the_second_connection_too(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(request.id, 0, 0)
    await agent.send(Result(request.id, Code.UNKNOWN_COMMAND, 0, b""))
    await agent.expect(Request)
    await agent.send(Result(request.id, Code.NOT_FOUND, 2, struct.pack("<I", 6)))
    with pytest.raises(NotStarted):
        await starting


async def test_a_start_without_a_connection_waits_for_one(stage: Stage) -> None:
    link, agent = await stage.open()
    stage.refusing = True
    agent.hang_up()
    await stage.dialled_often(2)
    starting = stage.begin(link.start(SPEC))
    stage.refusing = False
    agent = await stage.answer()
    request = await agent.expect(Request)
    assert request.type is FrameType.EXEC
    await agent.open(request.id)
    await starting


async def test_a_cancelled_start_is_not_begun_again(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    starting.cancel()
    await asyncio.wait([starting])
    agent = await stage.reconnect(agent)
    await agent.expect_attach(request.id, 0, 0)
    await agent.send(Result(request.id, Code.UNKNOWN_COMMAND, 0, b""))
    stating = stage.begin(link.stat(b"/"))
    assert (await agent.expect(Request)).type is FrameType.STAT
    stating.cancel()


# Output


async def test_output_goes_on_where_it_was_received_to(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, b"abc"), Data(process.id, 2, 0, b"x"))
    assert await process.stderr.read() == b"x"  # stdout has not been read, but it has been received
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 3, 1)
    await agent.open(process.id, stdout_start=3, stderr_start=1)
    await agent.send(Data(process.id, 1, 3, b"def"))
    got = b""
    while len(got) < 6:
        got += await process.stdout.read()
    assert got == b"abcdef"
    assert process.stdout.dropped == 0


async def test_dropped_output_is_counted(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, b"abc"))
    assert await process.stdout.read() == b"abc"
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 3, 0)
    await agent.open(process.id, stdout_start=3)
    await agent.send(Data(process.id, 1, 3, b"head"))
    assert await process.stdout.read() == b"head"
    await agent.send(Data(process.id, 1, 1000, b"tail"))
    assert await process.stdout.read() == b"tail"
    assert (process.stdout.position, process.stdout.dropped) == (1004, 993)


async def test_a_stream_that_had_ended_ends_again(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, b"abc"), Eof(process.id, 1, 3))
    assert await process.stdout.read() == b"abc"
    assert await process.stdout.read() == b""
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 3, 0)
    await agent.open(process.id, stdout_start=3)
    await agent.send(Eof(process.id, 1, 3), Eof(process.id, 2, 0), ended(process.id, 3))
    assert (await process.wait()).exit_code == 0


async def test_a_queue_is_bounded_however_often_the_connection_breaks(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    received = 0
    for _ in range(6):
        for _ in range(OUTPUT_WINDOW // MAX_DATA):
            await agent.send(Data(process.id, 1, received, bytes(MAX_DATA)))
            received += MAX_DATA
        agent.hang_up()
        agent = await stage.answer()
        request = await agent.expect(Request)
        received = decode_attach(request.payload)[0]
        await agent.open(process.id, stdout_start=received)
        assert link.queued <= 2 * OUTPUT_WINDOW
    assert received == OUTPUT_WINDOW


async def test_a_forgotten_command_is_an_error(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 0, 0)
    await agent.send(Result(process.id, Code.UNKNOWN_COMMAND, 0, b""))
    with pytest.raises(AgentError) as caught:
        await process.wait()
    assert caught.value.code is Code.UNKNOWN_COMMAND
    with pytest.raises(AgentError):
        await process.stdout.read()


async def test_commands_fail_when_there_is_no_other_connection(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, reply=CALM.reply))
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, b"abc"))
    stage.refusing = True
    agent.hang_up()
    with pytest.raises(LinkLost):
        await process.wait()
    assert await process.stdout.read() == b"abc"
    with pytest.raises(LinkLost):
        await process.stdout.read()
    with pytest.raises(LinkLost):
        await process.write(b"x")


# stdin


@pytest.mark.parametrize("received", range(7))
async def test_stdin_goes_on_at_what_the_agent_received(stage: Stage, received: int) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await process.write(b"abc")
    await process.write(b"def")
    await process.close_stdin()
    assert [await agent.receive() for _ in range(3)] == [
        Data(process.id, 0, 0, b"abc"),
        Data(process.id, 0, 3, b"def"),
        Eof(process.id, 0, 6),
    ]
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 0, 0)
    await agent.open(process.id, received=received)
    rest = b""
    while isinstance(frame := await agent.receive(), Data):
        assert frame.offset == received + len(rest)
        rest += frame.content
    assert rest == b"abcdef"[received:]
    assert frame == Eof(process.id, 0, 6)


async def test_stdin_written_without_a_connection_follows(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    agent.hang_up()
    other = await stage.pick_up()
    await process.write(b"abc")
    await process.close_stdin()
    await other.greet()
    await other.expect_attach(process.id, 0, 0)
    await other.open(process.id)
    assert await other.expect(Data) == Data(process.id, 0, 0, b"abc")
    assert await other.expect(Eof) == Eof(process.id, 0, 3)


async def test_nobody_reads_stdin_after_the_reconnection_either(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 0, 0)
    await agent.open(process.id)
    await agent.send(Eof(process.id, 0, 0), Data(process.id, 1, 0, b"x"))
    await process.stdout.read()
    with pytest.raises(BrokenInput):
        await process.write(b"abc")


# Orders


async def test_end_and_size_are_repeated_and_a_signal_is_not(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    signalling = stage.begin(process.signal(10))
    assert await agent.expect(Signal) == Signal(process.id, 10, 0)
    ping = await agent.expect(Ping)
    await agent.send(Pong(ping.token))
    await signalling
    await process.end(1.5)
    await process.resize(TerminalSize(1, 2))
    assert await agent.expect(End) == End(process.id, 1500)
    assert await agent.expect(Resize) == Resize(process.id, 1, 2)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 0, 0)
    await agent.open(process.id)
    assert await agent.expect(End) == End(process.id, 1500)
    assert await agent.expect(Resize) == Resize(process.id, 1, 2)
    await process.close_stdin()
    assert await agent.expect(Eof) == Eof(process.id, 0, 0)


async def test_a_signal_that_may_not_have_arrived_is_lost(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    signalling = stage.begin(process.signal(10))
    await agent.expect(Signal)
    agent = await stage.reconnect(agent)
    with pytest.raises(LinkLost, match="not known"):
        await signalling


async def test_orders_wait_until_the_command_is_attached_again(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(process.id, 0, 0)
    ending = stage.begin(process.end(0))
    await agent.open(process.id)
    assert await agent.expect(End) == End(process.id, 0)
    await ending


async def test_a_connection_that_breaks_while_detaching_detaches(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    detaching = stage.begin(process.detach())
    await agent.expect_order(FrameType.DETACH, process.id)
    agent = await stage.reconnect(agent)
    await detaching
    attaching = stage.begin(link.attach(process.id, 2, 3))
    await agent.expect_attach(process.id, 2, 3)
    await agent.open(process.id, stdout_start=2, stderr_start=5, received=9)
    again = await attaching
    assert (again.stdout.position, again.stderr.position, again.stderr.dropped) == (2, 5, 2)
    await again.write(b"x")
    assert await agent.expect(Data) == Data(process.id, 0, 9, b"x")


async def test_an_attach_is_repeated(stage: Stage) -> None:
    link, agent = await stage.open()
    attaching = stage.begin(link.attach(5, 2, 3))
    await agent.expect_attach(5, 2, 3)
    agent = await stage.reconnect(agent)
    await agent.expect_attach(5, 2, 3)
    await agent.open(5, stdout_start=2, stderr_start=3)
    assert (await attaching).id == 5


async def test_releases_are_repeated(stage: Stage) -> None:
    link, agent = await stage.open()
    await link.release(5)
    await link.release(6)
    await agent.expect_order(FrameType.RELEASE, 5)
    await agent.expect_order(FrameType.RELEASE, 6)
    agent = await stage.reconnect(agent)
    await agent.expect_order(FrameType.RELEASE, 5)
    await agent.expect_order(FrameType.RELEASE, 6)
