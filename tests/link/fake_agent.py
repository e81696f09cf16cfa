"""The other end of a link, played from a script: tests of the client read like a dialogue."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from k8e.link import AgentLink, Timing
from k8e.link.codec.frames import (
    AgentHello,
    Data,
    Eof,
    Frame,
    FrameType,
    HostHello,
    Opened,
    Order,
    Request,
    Result,
    Side,
)
from k8e.link.codec.protocol import FrameReader, encode
from k8e.link.codec.records import Attachment
from k8e.link.errors import Code
from k8e.link.model import Cause, ExecSpec, Outcome
from tests.link.agent_codec import decode_attach, encode_outcome

INSTANCE = bytes(range(16))
# Far beyond what anything here takes: it only turns a hang into a failure.
PATIENCE = 20.0
# For tests in which a deadline has to pass.
HASTY = Timing(handshake=0.1, reply=0.1, margin=0.1, quiet=0.03, pong=0.05, reconnect=0.2, long_reply=0.1)
# For those in which none may.
CALM = Timing(reconnect=PATIENCE)

SPEC = ExecSpec.of("cat")
FrameKind = TypeVar("FrameKind", bound=Frame)
T = TypeVar("T")


class FakeAgent:
    """One connection, from the agent's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(Side.HOST)
        self._frames: deque[Frame] = deque()
        self.hello: HostHello | None = None

    async def greet(self, **changes: Any) -> None:
        self.hello = await self.expect(HostHello)
        answer = AgentHello(1, self.hello.nonce, INSTANCE, "fake")
        await self.send(answer._replace(**changes))

    async def receive(self) -> Frame | None:
        """The host's next frame, None when it hung up."""
        while not self._frames:
            async with asyncio.timeout(PATIENCE):
                try:
                    data = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
                except ConnectionResetError:
                    return None
            if not data:
                return None
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()

    async def expect(self, kind: type[FrameKind]) -> FrameKind:
        frame = await self.receive()
        assert isinstance(frame, kind), f"expected {kind.__name__}, got {frame}"
        return frame

    async def expect_order(self, kind: FrameType, channel: int) -> None:
        assert await self.expect(Order) == Order(channel, kind)

    async def expect_attach(self, channel: int, stdout_from: int, stderr_from: int) -> None:
        request = await self.expect(Request)
        assert (request.id, request.type) == (channel, FrameType.ATTACH)
        assert decode_attach(request.payload) == (stdout_from, stderr_from)

    async def expect_hangup(self) -> None:
        """Whatever is still on its way, then the end."""
        while await self.receive() is not None:
            pass

    async def send(self, *frames: Frame) -> None:
        await self.send_raw(b"".join(map(encode, frames)))

    async def send_raw(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE):
            try:
                await asyncio.get_running_loop().sock_sendall(self._connection, data)
            except OSError as error:
                # A host that has seen enough hangs up in the middle of it.
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise

    async def open(self, channel: int, **changes: Any) -> None:
        """OPENED for a command."""
        await self.send(Opened(channel, Attachment(7, False, 0, 0, 0)._replace(**changes).encode()))

    async def finish(self, channel: int, stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0) -> None:
        """A whole command from OPENED on: its output and its end."""
        for stream, content in ((1, stdout), (2, stderr)):
            if content:
                await self.send(Data(channel, stream, 0, content))
            await self.send(Eof(channel, stream, len(content)))
        await self.send(ended(channel, len(stdout), len(stderr), exit_code))

    def hang_up(self) -> None:
        self._connection.close()


def ended(channel: int, stdout: int = 0, stderr: int = 0, exit_code: int = 0) -> Result:
    outcome = Outcome(exit_code, None, Cause.ITSELF, stdout, stderr, 0.5, 0.25, 0.125, 1000)
    return Result(channel, Code.OK, 0, encode_outcome(outcome))


class Stage:
    """A link and the agents it dials, one after the other."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[FakeAgent] = asyncio.Queue()
        self._agents: list[FakeAgent] = []
        self._links: list[AgentLink] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.refusing = False
        self.dialled = 0
        self._dialling = asyncio.Condition()

    async def __call__(self) -> socket.socket:
        self.dialled += 1
        async with self._dialling:
            self._dialling.notify_all()
        if self.refusing:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by the test")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        agent = FakeAgent(theirs)
        self._agents.append(agent)
        self._calls.put_nowait(agent)
        return ours

    async def dialled_often(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE), self._dialling:
            await self._dialling.wait_for(lambda: self.dialled >= count)

    async def answer(self, **changes: Any) -> FakeAgent:
        """Picks up and greets."""
        agent = await self.pick_up()
        await agent.greet(**changes)
        return agent

    async def reconnect(self, agent: FakeAgent) -> FakeAgent:
        """The connection breaks, and there is another one."""
        agent.hang_up()
        return await self.answer()

    async def pick_up(self) -> FakeAgent:
        async with asyncio.timeout(PATIENCE):
            return await self._calls.get()

    async def open(self, timing: Timing = CALM, **changes: Any) -> tuple[AgentLink, FakeAgent]:
        opening = self.begin(self.open_link(timing))
        agent = await self.answer(**changes)
        return await opening, agent

    async def open_link(self, timing: Timing = CALM, deadline: float = PATIENCE) -> AgentLink:
        link = await AgentLink.open(self, instance=INSTANCE, deadline=deadline, timing=timing)
        self._links.append(link)
        return link

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE):
                return await work

        task = asyncio.create_task(bounded())
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        for link in self._links:
            await link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for agent in self._agents:
            agent.hang_up()
