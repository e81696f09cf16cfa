"""Lost connections while files are read, written, listed and watched: what is repeated, and what nobody can know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from k8e.link import AgentLink
from k8e.link.codec.frames import (
    Data,
    Eof,
    FrameType,
    Opened,
    Request,
    Result,
)
from k8e.link.codec.records import IN_Q_OVERFLOW
from k8e.link.errors import Code, LinkLost
from k8e.link.model import Entry, FileType, WatchEvent
from k8e.link.sockets import AgentWatcher
from tests.link.agent_codec import decode_file_request, encode_entry, encode_event
from tests.link.fake_agent import CALM, FakeAgent, Stage

FILE = Entry(b"", FileType.FILE, 0o644, 0, 0, 10, 1)


async def take(watcher: AgentWatcher) -> WatchEvent:
    return await anext(aiter(watcher))


Operation = Callable[[AgentLink], Awaitable[object]]
REPEATED: dict[str, tuple[Operation, bytes]] = {
    "stat": (lambda link: link.stat(b"/x"), encode_entry(FILE)),
    "mkdir with parents": (lambda link: link.mkdir(b"/x"), b""),
    "chmod": (lambda link: link.chmod(b"/x", 0o600), b""),
}


@pytest.mark.parametrize(("operation", "answer"), REPEATED.values(), ids=REPEATED.keys())
async def test_what_may_be_done_twice_is_repeated(stage: Stage, operation: Operation, answer: bytes) -> None:
    link, agent = await stage.open()

    async def work() -> object:
        return await operation(link)

    working = stage.begin(work())
    first = await agent.expect(Request)
    agent = await stage.reconnect(agent)
    second = await agent.expect(Request)
    assert second[1:] == first[1:]
    assert second.id != first.id
    await agent.send(Result(second.id, Code.OK, 0, answer))
    await working


async def many(content: bytes) -> AsyncIterator[bytes]:
    yield content


UNREPEATED: dict[str, Operation] = {
    "mkdir": lambda link: link.mkdir(b"/x", parents=False),
    "move": lambda link: link.move(b"/x", b"/y"),
    "remove": lambda link: link.remove(b"/x"),
    "write": lambda link: link.write_file(b"/x", b"abc"),
    "append": lambda link: link.write_file(b"/x", b"abc", append=True),
    "streamed write": lambda link: link.write_file(b"/x", many(b"abc")),
    "connect": lambda link: link.connect(port=80),
}


@pytest.mark.parametrize("operation", UNREPEATED.values(), ids=UNREPEATED.keys())
async def test_what_may_not_be_done_twice_is_unknown(stage: Stage, operation: Operation) -> None:
    link, agent = await stage.open()

    async def work() -> object:
        return await operation(link)

    working = stage.begin(work())
    await agent.expect(Request)
    agent = await stage.reconnect(agent)
    with pytest.raises(LinkLost, match="not known"):
        await working
    stating = stage.begin(link.stat(b"/"))
    assert (await agent.expect(Request)).type is FrameType.STAT
    stating.cancel()


async def read_part(stage: Stage, link: AgentLink, agent: FakeAgent) -> tuple[asyncio.Task[bytes], FakeAgent, Request]:
    """Three bytes of ten, then the connection breaks."""
    reading = stage.begin(link.read_file(b"/x", offset=5, length=10))
    request = await agent.expect(Request)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.offset, asked.length) == (5, 10)
    await agent.send(Opened(request.id, encode_entry(FILE)), Data(request.id, 1, 0, b"abc"))
    agent = await stage.reconnect(agent)
    return reading, agent, await agent.expect(Request)


async def test_reading_a_file_goes_on_at_its_offset(stage: Stage) -> None:
    link, agent = await stage.open()
    reading, agent, request = await read_part(stage, link, agent)
    asked = decode_file_request(request.type, request.payload)
    assert (asked.offset, asked.length) == (8, 7)
    await agent.send(
        Opened(request.id, encode_entry(FILE)),
        Data(request.id, 1, 0, b"defg"),
        Eof(request.id, 1, 4),
        Result(request.id, Code.OK, 0, b""),
    )
    assert await reading == b"abcdefg"


@pytest.mark.parametrize("now", [replace(FILE, size=11), replace(FILE, mtime_ns=2)], ids=["size", "mtime"])
async def test_a_file_that_changed_meanwhile_is_not_mixed(stage: Stage, now: Entry) -> None:
    link, agent = await stage.open()
    reading, agent, request = await read_part(stage, link, agent)
    await agent.send(Opened(request.id, encode_entry(now)), Data(request.id, 1, 0, b"other"))
    with pytest.raises(LinkLost, match="changed"):
        await reading
    await agent.expect_order(FrameType.CANCEL, request.id)


async def test_a_listing_is_repeated_before_its_first_entry_and_not_after(stage: Stage) -> None:
    link, agent = await stage.open()
    listing = stage.begin(link.list_dir(b"/x"))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""))
    agent = await stage.reconnect(agent)
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""), Data(request.id, 1, 0, encode_entry(replace(FILE, name=b"a"))))
    await stage.reconnect(agent)
    with pytest.raises(LinkLost):
        await listing


async def test_a_watch_is_set_again_and_says_that_events_were_lost(stage: Stage) -> None:
    link, agent = await stage.open()
    watching = stage.begin(link.watch(b"/x"))
    request = await agent.expect(Request)
    await agent.send(Opened(request.id, b""))
    watcher = await watching
    event = WatchEvent(2, 0, b"a")
    await agent.send(Data(request.id, 1, 0, encode_event(event)))
    assert await anext(aiter(watcher)) == event
    agent.hang_up()
    nexting = stage.begin(take(watcher))
    agent = await stage.answer()
    request = await agent.expect(Request)
    assert request.type is FrameType.WATCH
    await agent.send(Opened(request.id, b""), Data(request.id, 1, 0, encode_event(event)))
    assert await nexting == WatchEvent(IN_Q_OVERFLOW, 0, b"", overflow=True)
    assert await anext(aiter(watcher)) == event
    await watcher.close()
    await agent.expect_order(FrameType.CANCEL, request.id)


async def test_a_connection_that_keeps_breaking_is_kept_while_it_is_of_use(stage: Stage) -> None:
    timing = replace(CALM, stable=1000.0, reconnect=0.5, first_backoff=0.05, last_backoff=0.1)
    link, agent = await stage.open(timing)
    for _ in range(10):  # the pauses alone are longer than `reconnect`
        stating = stage.begin(link.stat(b"/x"))
        request = await agent.expect(Request)
        await agent.send(Result(request.id, Code.OK, 0, encode_entry(FILE)))
        assert await stating == FILE
        agent = await stage.reconnect(agent)
