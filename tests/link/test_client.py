"""The client when all goes well, when it is refused, and when its callers change their minds."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from k8e import link as package
from k8e.link import AgentLink
from k8e.link.codec.frames import Ack, Data, End, Eof, FrameType, Opened, Order, Ping, Pong, Request, Result, Signal
from k8e.link.codec.protocol import INPUT_WINDOW, MAX_DATA, OUTPUT_WINDOW
from k8e.link.codec.requests import KEEP_MODE, TO_THE_END
from k8e.link.command import AgentProcess
from k8e.link.errors import AgentError, BrokenInput, Code, LinkLost, LinkTimeout, NotStarted
from k8e.link.errors import Stage as LaunchStage
from k8e.link.model import Cause, CommandInfo, Connection, Entry, ExecSpec, FileType, Process, Sandbox, Scope, Watcher
from k8e.link.sockets import AgentConnection, AgentWatcher
from tests.link.agent_codec import decode_exec, decode_file_request, decode_park, encode_command, encode_entry
from tests.link.fake_agent import CALM, HASTY, INSTANCE, SPEC, FakeAgent, Stage, ended

FILE = Entry(b"", FileType.FILE, 0o644, 0, 0, 10, 1)


def test_the_client_is_a_sandbox() -> None:
    """For mypy: these assignments are the check."""

    def check(link: AgentLink, process: AgentProcess, connection: AgentConnection, watcher: AgentWatcher) -> None:
        _sandbox: Sandbox = link
        _process: Process = process
        _connection: Connection = connection
        _watcher: Watcher = watcher

    assert callable(check)


def test_the_public_surface_is_a_list() -> None:
    assert package.__all__ == ["AgentLink", "Dialer", "SocketDialer", "Timing", "UnixDialer"]
    assert all(hasattr(package, name) for name in package.__all__)


async def start(stage: Stage, link: AgentLink, agent: FakeAgent, spec: ExecSpec = SPEC) -> AgentProcess:
    starting = stage.begin(link.start(spec))
    request = await agent.expect(Request)
    assert decode_exec(request.payload) == spec
    await agent.open(request.id)
    return await starting


# Commands


async def test_a_command_from_start_to_end(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    assert process.pid == 7
    await process.write(b"in")
    await process.close_stdin()
    assert await agent.expect(Data) == Data(process.id, 0, 0, b"in")
    assert await agent.expect(Eof) == Eof(process.id, 0, 2)
    await agent.finish(process.id, b"out", b"err", exit_code=9)
    assert await process.stdout.read() == b"out"
    assert await process.stdout.read() == b""
    assert await process.stderr.read() == b"err"
    outcome = await process.wait()
    assert (outcome.exit_code, outcome.signal, outcome.cause) == (9, None, Cause.ITSELF)
    await agent.expect_order(FrameType.RELEASE, process.id)
    assert await process.wait() == outcome
    with pytest.raises(BrokenInput):
        await process.write(b"x")
    await process.signal(9)  # as with kill(2) of what has just ended, but without its error


async def test_run_collects_both_streams_and_feeds_stdin(stage: Stage) -> None:
    link, agent = await stage.open()
    content = bytes(range(256)) * 4096
    running = stage.begin(link.run(SPEC, content))
    request = await agent.expect(Request)
    await agent.open(request.id)
    got = b""
    acked = 0
    # Both streams come while stdin still goes, and more of them than a window.
    while not isinstance(frame := await agent.receive(), Eof):
        if isinstance(frame, Data):
            got += frame.content
            await agent.send(Ack(request.id, 0, len(got)), frame._replace(stream=1), frame._replace(stream=2))
        else:
            acked += isinstance(frame, Ack)
    assert acked >= 2 * (len(content) // OUTPUT_WINDOW - 1)
    await agent.send(Eof(request.id, 1, len(content)), Eof(request.id, 2, len(content)))
    await agent.send(ended(request.id, len(content), len(content)))
    done = await running
    assert (done.stdout, done.stderr) == (content, content)


async def test_run_keeps_the_first_bytes_and_the_totals(stage: Stage) -> None:
    link, agent = await stage.open()
    running = stage.begin(link.run(SPEC, limit=4))
    request = await agent.expect(Request)
    await agent.open(request.id)
    await agent.finish(request.id, b"0123456789", b"err")
    done = await running
    assert (done.stdout, done.stderr, done.outcome.stdout_bytes) == (b"0123", b"err", 10)


async def test_run_does_not_mind_that_stdin_is_not_wanted(stage: Stage) -> None:
    link, agent = await stage.open()
    running = stage.begin(link.run(SPEC, bytes(10 * INPUT_WINDOW)))
    request = await agent.expect(Request)
    await agent.open(request.id)
    await agent.send(Eof(request.id, 0, 0))
    await agent.finish(request.id)
    assert (await running).outcome.exit_code == 0


async def test_a_refused_command_says_at_which_stage(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await agent.send(Result(request.id, Code.NOT_DIRECTORY, 20, struct.pack("<I", 5)))
    with pytest.raises(NotStarted) as caught:
        await starting
    assert (caught.value.code, caught.value.errno, caught.value.stage) == (Code.NOT_DIRECTORY, 20, LaunchStage.CWD)


async def test_a_lost_command_is_not_a_success(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, b"abc"), Result(process.id, Code.LOST, 0, b""))
    assert await process.stdout.read() == b"abc"
    with pytest.raises(AgentError):
        await process.stdout.read()
    with pytest.raises(AgentError) as caught:
        await process.wait()
    assert caught.value.code is Code.LOST


async def test_discarded_output_keeps_flowing(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    await agent.send(Data(process.id, 1, 0, bytes(MAX_DATA)))
    process.discard()
    for offset in range(MAX_DATA, 4 * OUTPUT_WINDOW, MAX_DATA):
        await agent.send(Data(process.id, 1, offset, bytes(MAX_DATA)))
        assert (await agent.expect(Ack)).offset == offset if offset > MAX_DATA else await agent.expect(Ack)
    assert link.queued == 0


async def test_stdin_waits_for_the_agent_and_is_bounded(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    writing = stage.begin(process.write(bytes(INPUT_WINDOW + 1)))
    got = 0
    while got < INPUT_WINDOW:
        got += len((await agent.expect(Data)).content)
    assert (got, writing.done(), link.queued) == (INPUT_WINDOW, False, INPUT_WINDOW)
    await agent.send(Ack(process.id, 0, INPUT_WINDOW))
    assert len((await agent.expect(Data)).content) == 1
    await writing


async def test_a_command_without_stdin_takes_none(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent, replace(SPEC, stdin=False))
    with pytest.raises(BrokenInput):
        await process.write(b"x")
    await process.close_stdin()
    with pytest.raises(ValueError, match="without stdin"):
        await link.run(replace(SPEC, stdin=False), b"x")


async def test_a_signal_is_confirmed(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    both = [stage.begin(process.signal(number, Scope.TREE)) for number in (1, 2)]
    assert await agent.expect(Signal) == Signal(process.id, 1, 2)
    first = await agent.expect(Ping)
    assert await agent.expect(Signal) == Signal(process.id, 2, 2)
    await agent.send(Pong(first.token))
    await both[0]
    assert not both[1].done()
    await agent.send(Pong((await agent.expect(Ping)).token))
    await both[1]
    for wrong in (0, 65, -1):
        with pytest.raises(ValueError, match="signal"):
            await process.signal(wrong)


async def test_a_detached_command_is_not_released(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    detaching = stage.begin(process.detach())
    await agent.expect_order(FrameType.DETACH, process.id)
    await agent.send(Result(process.id, Code.DETACHED, 0, b""))
    await detaching
    with pytest.raises(AgentError) as caught:
        await process.wait()
    assert caught.value.code is Code.DETACHED
    attaching = stage.begin(link.attach(process.id))
    await agent.expect_attach(process.id, 0, 0)
    await agent.open(process.id)
    again = await attaching
    with pytest.raises(AgentError) as caught:
        await link.attach(process.id)
    assert caught.value.code is Code.BUSY
    await agent.finish(process.id)
    await again.wait()
    await agent.expect_order(FrameType.RELEASE, process.id)


async def test_attaching_to_nothing_is_refused(stage: Stage) -> None:
    link, agent = await stage.open()
    attaching = stage.begin(link.attach(5))
    await agent.expect_attach(5, 0, 0)
    await agent.send(Result(5, Code.UNKNOWN_COMMAND, 0, b""))
    with pytest.raises(AgentError) as caught:
        await attaching
    assert caught.value.code is Code.UNKNOWN_COMMAND


async def test_commands_are_listed(stage: Stage) -> None:
    link, agent = await stage.open()
    info = CommandInfo(5, 7, True, False, None, None, None, 1.5, 10, 20, b"cat")
    listing = stage.begin(link.commands())
    request = await agent.expect(Request)
    raw = encode_command(info) * 2
    await agent.send(Opened(request.id, b""), Data(request.id, 1, 0, raw[:30]), Data(request.id, 1, 30, raw[30:]))
    await agent.send(Eof(request.id, 1, len(raw)), Result(request.id, Code.OK, 0, b""))
    assert await listing == [info, info]


# Changed minds


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_start_ends_what_it_may_have_started(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await cancel(starting)
    await agent.open(request.id)
    assert await agent.expect(End) == End(request.id, 0)
    await agent.finish(request.id, b"unwanted")
    await agent.expect_order(FrameType.RELEASE, request.id)
    assert link.queued == 0


async def test_a_cancelled_start_that_failed_needs_nothing(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    await cancel(starting)
    await agent.send(Result(request.id, Code.NOT_FOUND, 2, struct.pack("<I", 6)))
    stating = stage.begin(link.stat(b"/"))
    assert (await agent.expect(Request)).type is FrameType.STAT
    await cancel(stating)


async def test_a_cancelled_start_of_a_detached_command_ends_it_too(stage: Stage) -> None:
    link, agent = await stage.open()
    starting = stage.begin(link.start(replace(SPEC, detached=True)))
    request = await agent.expect(Request)
    await cancel(starting)
    await agent.open(request.id)
    await agent.send(Result(request.id, Code.DETACHED, 0, b""))
    # This one crossed the detachment; it is said again, attached.
    assert await agent.expect(End) == End(request.id, 0)
    await agent.expect_attach(request.id, 0, 0)
    await agent.open(request.id)
    assert await agent.expect(End) == End(request.id, 0)
    await agent.finish(request.id)
    await agent.expect_order(FrameType.RELEASE, request.id)


async def test_an_overdue_start_is_ended(stage: Stage) -> None:
    link, agent = await stage.open(replace(HASTY, quiet=100.0))
    starting = stage.begin(link.start(SPEC))
    request = await agent.expect(Request)
    with pytest.raises(LinkTimeout):
        await starting
    await agent.open(request.id)
    assert await agent.expect(End) == End(request.id, 0)


async def test_a_cancelled_run_ends_its_command(stage: Stage) -> None:
    link, agent = await stage.open()
    running = stage.begin(link.run(SPEC))
    request = await agent.expect(Request)
    await agent.open(request.id)
    await agent.expect(Eof)
    await cancel(running)
    assert await agent.expect(End) == End(request.id, 0)
    await agent.finish(request.id)
    await agent.expect_order(FrameType.RELEASE, request.id)


async def test_a_cancelled_wait_can_be_repeated(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    waiting = stage.begin(process.wait())
    await asyncio.sleep(0)
    await cancel(waiting)
    await agent.finish(process.id, exit_code=4)
    assert (await process.wait()).exit_code == 4


async def test_a_cancelled_attach_leaves_the_command_alone(stage: Stage) -> None:
    link, agent = await stage.open()
    attaching = stage.begin(link.attach(5))
    await agent.expect_attach(5, 0, 0)
    await cancel(attaching)
    await agent.open(5)
    await agent.expect_order(FrameType.DETACH, 5)


async def test_a_cancelled_request_is_cancelled_at_the_agent(stage: Stage) -> None:
    link, agent = await stage.open()
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    await cancel(stating)
    await agent.expect_order(FrameType.CANCEL, request.id)
    await agent.send(Result(request.id, Code.OK, 0, encode_entry(FILE)))  # it crossed
    stating = stage.begin(link.stat(b"/"))
    request = await agent.expect(Request)
    await agent.send(Result(request.id, Code.OK, 0, encode_entry(FILE)))
    assert await stating == FILE


async def test_a_cancelled_write_is_cancelled_at_the_agent(stage: Stage) -> None:
    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", bytes(4 * INPUT_WINDOW)))
    request = await agent.expect(Request)
    await agent.expect(Data)
    await cancel(writing)
    while isinstance(frame := await agent.receive(), Data):
        pass
    assert frame == Order(request.id, FrameType.CANCEL)
    await agent.send(Opened(request.id, b""), Ack(request.id, 0, 10), Result(request.id, Code.CANCELED, 0, b""))
    assert link.queued == 0


# Files


async def test_a_file_is_written_without_waiting_for_its_opening(stage: Stage) -> None:
    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", b"content", exclusive=True))
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.path, asked.flags, asked.mode) == (b"/x", 2, KEEP_MODE)
    assert await agent.expect(Data) == Data(request.id, 0, 0, b"content")
    assert await agent.expect(Eof) == Eof(request.id, 0, 7)
    await agent.send(Opened(request.id, b""), Result(request.id, Code.OK, 0, struct.pack("<Q", 7)))
    assert await writing == 7


async def test_a_streamed_file_is_written_as_it_comes(stage: Stage) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b""
        yield b"cd"

    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", content(), append=True, mode=0o600))
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.flags, asked.mode) == (1, 0o600)
    assert await agent.expect(Data) == Data(request.id, 0, 0, b"ab")
    assert await agent.expect(Data) == Data(request.id, 0, 2, b"cd")
    assert await agent.expect(Eof) == Eof(request.id, 0, 4)
    await agent.send(Opened(request.id, b""), Result(request.id, Code.OK, 0, struct.pack("<Q", 10)))
    assert await writing == 10


async def test_a_write_that_fails_in_the_middle_says_why(stage: Stage) -> None:
    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", bytes(4 * INPUT_WINDOW)))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""), Result(request.id, Code.NO_SPACE, 28, b""))
    with pytest.raises(AgentError) as caught:
        await writing
    assert caught.value.code is Code.NO_SPACE


async def test_content_that_fails_leaves_no_file(stage: Stage) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"ab"
        raise ZeroDivisionError

    link, agent = await stage.open()
    writing = stage.begin(link.write_file(b"/x", content()))
    request = await agent.expect(Request)
    await agent.expect(Data)
    await agent.expect_order(FrameType.CANCEL, request.id)
    with pytest.raises(ZeroDivisionError):
        await writing


async def test_a_file_beyond_the_limit_is_too_big(stage: Stage) -> None:
    link, agent = await stage.open()
    reading = stage.begin(link.read_file(b"/x", limit=9))
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.offset, asked.length) == (0, TO_THE_END)
    await agent.send(Opened(request.id, encode_entry(FILE)), Data(request.id, 1, 0, bytes(10)))
    with pytest.raises(AgentError) as caught:
        await reading
    assert caught.value.code is Code.TOO_BIG
    await agent.expect_order(FrameType.CANCEL, request.id)


async def test_a_reader_that_stops_is_cancelled_at_the_agent(stage: Stage) -> None:
    link, agent = await stage.open()
    stream = link.read_stream(b"/x")

    async def first() -> bytes:
        return await anext(stream)

    reading = stage.begin(first())
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, encode_entry(FILE)), Data(request.id, 1, 0, b"abc"))
    assert await reading == b"abc"
    await stream.aclose()
    await agent.expect_order(FrameType.CANCEL, request.id)


@pytest.mark.parametrize(
    ("call", "kind", "flags", "paths"),
    [
        ("stat", FrameType.STAT, 1, (b"/x", b"")),
        ("lstat", FrameType.STAT, 0, (b"/x", b"")),
        ("mkdir", FrameType.MKDIR, 1, (b"/x", b"")),
        ("move", FrameType.MOVE, 0, (b"/x", b"/y")),
        ("move without replacing", FrameType.MOVE, 1, (b"/x", b"/y")),
        ("remove", FrameType.REMOVE, 0, (b"/x", b"")),
        ("remove all", FrameType.REMOVE, 1, (b"/x", b"")),
        ("chmod", FrameType.CHMOD, 0, (b"/x", b"")),
        ("bind", FrameType.BIND, 0, (b"/x", b"/y")),
        ("make writable", FrameType.BIND, 1, (b"/x", b"")),
        ("end binding", FrameType.BIND, 2, (b"/x", b"")),
    ],
)
async def test_requests_and_refusals(
    stage: Stage, call: str, kind: FrameType, flags: int, paths: tuple[bytes, bytes]
) -> None:
    link, agent = await stage.open(generation=3)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "stat": lambda: link.stat(b"/x"),
        "lstat": lambda: link.stat(b"/x", follow=False),
        "mkdir": lambda: link.mkdir(b"/x"),
        "move": lambda: link.move(b"/x", b"/y"),
        "move without replacing": lambda: link.move(b"/x", b"/y", replace=False),
        "remove": lambda: link.remove(b"/x"),
        "remove all": lambda: link.remove(b"/x", recursive=True),
        "chmod": lambda: link.chmod(b"/x", 0o600),
        "bind": lambda: link.bind([(b"/x", b"/y")]),
        "make writable": lambda: link.bind(writable=[b"/x"]),
        "end binding": lambda: link.bind(last=b"/x"),
    }

    async def work() -> object:
        return await calls[call]()

    working = stage.begin(work())
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (request.type, asked.flags, (asked.path, asked.second)) == (kind, flags, paths)
    await agent.send(Result(request.id, Code.DENIED, 13, b""))
    with pytest.raises(AgentError) as caught:
        await working
    assert (caught.value.code, caught.value.errno) == (Code.DENIED, 13)


async def test_nothing_is_sent_for_a_bad_request(stage: Stage) -> None:
    link, agent = await stage.open()
    for bad in (
        link.stat(b"\0"),
        link.start(ExecSpec(argv=())),
        link.write_file(b"/x", b"", mode=0o10000),
        link.connect(),
        link.connect(port=0),
        link.connect(port=1, path=b"/x"),
        link.attach(5, -1),
    ):
        with pytest.raises(ValueError, match=r"."):
            await bad
    await link.release(5)
    await agent.expect_order(FrameType.RELEASE, 5)


# Sockets


async def test_a_connection_carries_both_directions(stage: Stage) -> None:
    link, agent = await stage.open()
    connecting = stage.begin(link.connect(port=80))
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.flags, asked.offset) == (0, 80)
    await agent.send(Opened(request.id, b""))
    connection = await connecting
    await connection.write(b"ping")
    await connection.close_write()
    assert await agent.expect(Data) == Data(request.id, 0, 0, b"ping")
    assert await agent.expect(Eof) == Eof(request.id, 0, 4)
    await agent.send(Data(request.id, 1, 0, b"pong"), Eof(request.id, 1, 4), Result(request.id, Code.OK, 0, b""))
    assert await connection.read() == b"pong"
    assert await connection.read() == b""
    await connection.close()


async def test_a_closed_connection_is_cancelled_at_the_agent(stage: Stage) -> None:
    link, agent = await stage.open()
    connecting = stage.begin(link.connect(path=b"/s"))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""))
    connection = await connecting
    await connection.close()
    await connection.close()
    await agent.expect_order(FrameType.CANCEL, request.id)


# The link itself


async def test_a_closed_link_fails_what_waits_and_hangs_up(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await start(stage, link, agent)
    waiting = stage.begin(process.wait())
    await asyncio.sleep(0)
    await link.close()
    with pytest.raises(LinkLost):
        await waiting
    with pytest.raises(LinkLost):
        await link.stat(b"/")
    await agent.expect_hangup()
    await link.close()
    assert stage.dialled == 1


async def test_an_instance_has_sixteen_bytes(stage: Stage) -> None:
    with pytest.raises(ValueError, match="instance"):
        await AgentLink.open(stage, instance=INSTANCE[:15])


async def test_an_agent_that_is_just_starting_is_waited_for(stage: Stage) -> None:
    stage.refusing = True
    opening = stage.begin(stage.open_link(CALM))
    await stage.dialled_often(3)
    stage.refusing = False
    await stage.answer()
    assert (await opening).agent_version == "fake"


PARKABLE = ExecSpec.of("python3", "-c", "0" * 32)


async def test_parking_says_what_waits_and_for_how_long(stage: Stage) -> None:
    link, agent = await stage.open(generation=2)
    parking = stage.begin(link.park(PARKABLE, b"/loader.so", keep=1.5))
    request = await agent.expect(Request)
    assert request.type is FrameType.PARK
    assert decode_park(request.payload) == (PARKABLE, b"/loader.so", 1.5)
    await agent.send(Result(request.id, Code.OK, 0, b""))
    await parking


async def test_what_cannot_be_parked_is_refused(stage: Stage) -> None:
    link, agent = await stage.open(generation=2)
    parking = stage.begin(link.park(PARKABLE, b"/loader.so"))
    request = await agent.expect(Request)
    await agent.send(Result(request.id, Code.UNSUPPORTED, 0, b""))
    with pytest.raises(AgentError) as caught:
        await parking
    assert caught.value.code is Code.UNSUPPORTED
    with pytest.raises(ValueError, match="placeholder"):
        await link.park(SPEC, b"/loader.so")
    with pytest.raises(ValueError, match="placeholder"):
        await link.park(PARKABLE, b"")


async def test_an_older_agent_is_asked_for_nothing_that_it_does_not_know(stage: Stage) -> None:
    link, agent = await stage.open()  # of generation 1
    with pytest.raises(AgentError, match="older"):
        await link.park(PARKABLE, b"/loader.so")
    with pytest.raises(AgentError, match="older"):
        await link.bind([(b"/x", b"/y")])
    starting = stage.begin(link.start(replace(PARKABLE, parked=True)))
    request = await agent.expect(Request)
    assert decode_exec(request.payload) == PARKABLE
    await agent.open(request.id)
    assert not (await starting).handed_over


async def test_who_took_a_command_is_said(stage: Stage) -> None:
    link, agent = await stage.open(generation=2)
    starting = stage.begin(link.start(replace(PARKABLE, parked=True)))
    request = await agent.expect(Request)
    assert decode_exec(request.payload).parked
    await agent.open(request.id, handed_over=True)
    assert (await starting).handed_over


async def test_what_is_bound_is_all_on_the_way_before_it_is_answered(stage: Stage) -> None:
    link, agent = await stage.open(generation=3)
    binding = stage.begin(link.bind([(b"/t/0", b"/w"), (b"/w/k", b"/w/k")], writable=[b"/w"], last=b"/t"))
    requests = [await agent.expect(Request) for _ in range(4)]
    asked = [decode_file_request(request.type, request.payload) for request in requests]
    assert [(each.path, each.second, each.flags) for each in asked] == [
        (b"/t/0", b"/w", 0),
        (b"/w/k", b"/w/k", 0),
        (b"/w", b"", 1),
        (b"/t", b"", 2),
    ]
    for request in requests:
        await agent.send(Result(request.id, Code.OK, 0, b""))
    await binding
