"""Attached to without acknowledging: which frames that takes, and what a broken connection means for it."""

from __future__ import annotations

import pytest

from k8e.link import AgentLink
from k8e.link.codec.frames import Data, Eof, FrameType, Opened, Order, Request, Result
from k8e.link.codec.protocol import MAX_DATA
from k8e.link.codec.records import Attachment
from k8e.link.command import AgentProcess
from k8e.link.errors import AgentError, Code, LinkLost
from tests.link.agent_codec import decode_attach
from tests.link.fake_agent import FakeAgent, Stage, ended

COMMAND = 0x1234
CONTENT = bytes(range(256)) * 4096  # as much as the largest window


async def attach(stage: Stage, link: AgentLink, agent: FakeAgent) -> AgentProcess:
    attaching = stage.begin(link.attach(COMMAND, hold=True))
    request = await agent.expect(Request)
    assert (request.id, decode_attach(request.payload)) == (COMMAND, (0, 0)), "nothing is acknowledged by asking"
    await agent.send(Opened(COMMAND, Attachment(7, True, 0, 0, 0).encode()))
    return await attaching


async def send_all(agent: FakeAgent) -> None:
    for offset in range(0, len(CONTENT), MAX_DATA):
        await agent.send(Data(COMMAND, 1, offset, CONTENT[offset : offset + MAX_DATA]))
    await agent.send(Eof(COMMAND, 1, len(CONTENT)))
    await agent.send(Eof(COMMAND, 2, 0))
    await agent.send(ended(COMMAND, len(CONTENT), 0, 3))


async def read_all(process: AgentProcess) -> bytes:
    content = b""
    while piece := await process.stdout.read():
        content += piece
    return content


async def test_neither_reading_nor_waiting_says_a_word_to_the_agent(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await attach(stage, link, agent)
    await send_all(agent)
    assert await read_all(process) == CONTENT
    assert (await process.wait()).exit_code == 3
    # No ACK and no RELEASE in between: the next thing the agent hears is the next thing that is asked.
    again = stage.begin(link.attach(COMMAND, hold=True))
    request = await agent.expect(Request)
    assert decode_attach(request.payload) == (0, 0)
    await agent.send(Result(COMMAND, Code.UNKNOWN_COMMAND, 0, b""))
    with pytest.raises(AgentError) as raised:
        await again
    assert raised.value.code is Code.UNKNOWN_COMMAND


async def test_release_is_what_lets_it_go(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await attach(stage, link, agent)
    await send_all(agent)
    await read_all(process)
    await process.wait()
    await link.release(COMMAND)
    assert (await agent.expect(Order)).id == COMMAND


async def test_a_broken_connection_ends_it_and_it_is_not_resumed(stage: Stage) -> None:
    """Resuming in the middle would acknowledge what lies before."""
    link, agent = await stage.open()
    process = await attach(stage, link, agent)
    await agent.send(Data(COMMAND, 1, 0, CONTENT[:MAX_DATA]))
    assert await process.stdout.read() == CONTENT[:MAX_DATA]
    agent.hang_up()
    agent = await stage.answer()
    with pytest.raises(LinkLost):
        await process.stdout.read()
    with pytest.raises(LinkLost):
        await process.wait()
    process = await attach(stage, link, agent)
    await send_all(agent)
    assert await read_all(process) == CONTENT


async def test_letting_go_of_it_is_a_detachment(stage: Stage) -> None:
    link, agent = await stage.open()
    process = await attach(stage, link, agent)
    await agent.send(Data(COMMAND, 1, 0, b"some"))
    assert await process.stdout.read() == b"some"
    leaving = stage.begin(process.detach())
    order = await agent.expect(Order)
    await agent.send(Result(order.id, Code.DETACHED, 0, b""))
    await leaving
    assert order.type is FrameType.DETACH
