"""A started command, as its caller uses it."""

from __future__ import annotations

import asyncio

from k8e.link.channel import State
from k8e.link.codec.frames import Signal
from k8e.link.codec.protocol import ERRORS, OUTPUT
from k8e.link.codec.records import MAX_SIGNAL
from k8e.link.codec.requests import milliseconds
from k8e.link.command import CommandChannel
from k8e.link.errors import BrokenInput, Code, LinkLost, LinkTimeout, ProtocolViolation
from k8e.link.model import ExecSpec, Outcome, Scope, TerminalSize
from k8e.link.multiplexer import Multiplexer, deadline
from k8e.link.streams import Inbound


class AgentProcess:
    """Implements `model.Process`. Survives lost connections; what was queued when the link failed can still be read."""

    def __init__(self, mux: Multiplexer, channel: CommandChannel, spec: ExecSpec | None, *, hold: bool = False) -> None:
        self._mux = mux
        self._hold = hold
        self._channel = channel
        self._spec = spec
        self._released = False
        self._due: float | None = None  # when the result is overdue, on the loop's clock
        if spec is not None and not spec.stdin:
            channel.input.stop()
        if spec is not None and spec.timeout is not None:
            self._expect_within(spec.timeout + spec.grace + spec.drain)

    @property
    def id(self) -> int:
        return self._channel.id

    @property
    def pid(self) -> int:
        assert self._channel.attachment is not None
        return self._channel.attachment.pid

    @property
    def handed_over(self) -> bool:
        assert self._channel.attachment is not None
        return self._channel.attachment.handed_over

    @property
    def stdout(self) -> Inbound:
        return self._channel.inbound[OUTPUT]

    @property
    def stderr(self) -> Inbound:
        return self._channel.inbound[ERRORS]

    @property
    def channel(self) -> CommandChannel:
        return self._channel

    async def write(self, data: bytes) -> None:
        await self._channel.write(data)

    async def close_stdin(self) -> None:
        self._channel.close_input()

    async def signal(self, number: int, scope: Scope = Scope.PROCESS) -> None:
        """Returns when the agent has passed it on. A command that has ended already takes no signals: no error."""
        if not 1 <= number <= MAX_SIGNAL:
            raise ValueError(f"signal {number} does not exist")
        async with deadline(self._mux.timing.reply, f"signal {number} to {self._channel.subject}"):
            if not await self._reach():
                return
            connection = await self._mux.connected()
            connection.post(Signal(self.id, number, scope))
            try:
                await connection.confirm()
            except LinkLost:
                raise LinkLost(f"the connection broke: it is not known whether signal {number} arrived") from None

    async def end(self, grace: float = 2.0) -> None:
        grace_ms = milliseconds("grace", grace)
        if await self._reach():
            self._expect_within(grace + (self._spec.drain if self._spec else 0))
            self._channel.end(grace_ms)
            self._channel.changed.notify()

    async def resize(self, size: TerminalSize) -> None:
        if not (0 <= size.rows <= 0xFFFF and 0 <= size.columns <= 0xFFFF):
            raise ValueError(f"a terminal of {size.rows} by {size.columns}")
        if await self._reach():
            self._channel.resize(size)

    async def detach(self) -> None:
        """Returns when it can be attached to again. What was not read yet is not lost: attach from `position` on."""
        if self._channel.state is not State.DONE:
            self._channel.detach()
        async with deadline(self._mux.timing.reply, f"detaching from {self._channel.subject}"):
            await _settle(self._channel)
        if self._channel.error is not None:
            raise self._channel.error.with_traceback(None)

    def discard(self) -> None:
        self.stdout.divert(_drop)
        self.stderr.divert(_drop)

    async def wait(self) -> Outcome:
        """Returns how the command ended and lets the agent forget it, unless it was held. Raises LinkTimeout when the
        result is overdue and no output waits for the caller to read it."""
        heard = -1
        while self._channel.result is None and self._channel.error is None:
            try:
                async with asyncio.timeout_at(self._due):
                    await self._channel.changed.wait()
            except TimeoutError:
                progress = self.stdout.received + self.stderr.received
                unread = self.stdout.queued + self.stderr.queued
                if self._channel.state is State.OPEN and not unread and progress == heard:
                    raise LinkTimeout(f"{self._channel.subject} should have ended by now") from None
                heard = progress
                self._due = asyncio.get_running_loop().time() + self._mux.timing.margin
        return self._take_outcome()

    def _take_outcome(self) -> Outcome:
        channel = self._channel
        if channel.result is None:
            assert channel.error is not None
            raise channel.error.with_traceback(None)
        if channel.result.code is not Code.DETACHED and not self._released and not self._hold:
            self._released = True
            self._mux.release(channel.id)
        if channel.outcome is None:
            raise channel.describe(channel.result)
        return channel.outcome

    def _expect_within(self, seconds: float) -> None:
        due = asyncio.get_running_loop().time() + seconds + self._mux.timing.margin
        self._due = due if self._due is None else min(self._due, due)

    async def _reach(self) -> bool:
        """Waits until the command can be reached; False when it has ended."""
        while True:
            await self._mux.connected()
            if self._channel.state is State.OPEN:
                return True
            if self._channel.state is State.DONE:
                return False
            await self._channel.changed.wait()


def _drop(_content: bytes) -> None:
    pass


async def feed(process: AgentProcess, content: bytes) -> None:
    """Writes all of stdin and closes it. A command that reads less is no error."""
    try:
        if content:
            await process.write(content)
    except BrokenInput:
        return
    await process.close_stdin()


class Collector:
    """Keeps the first bytes of a stream; how many there were in all is in the outcome."""

    def __init__(self, limit: int) -> None:
        self._chunks: list[bytes] = []
        self._room = limit

    def __call__(self, content: bytes) -> None:
        if self._room > 0:
            kept = content[: self._room]
            self._room -= len(kept)
            self._chunks.append(kept)

    def take(self) -> bytes:
        return b"".join(self._chunks)


def end_abandoned(mux: Multiplexer, channel: CommandChannel) -> None:
    """Ends a command whose caller is gone and lets the agent forget it, in the background."""
    channel.abandon()
    if mux.find(channel.id) is channel or channel.attachment is not None:
        mux.spawn(_end_abandoned(mux, channel))


async def _end_abandoned(mux: Multiplexer, channel: CommandChannel) -> None:
    try:
        async with deadline(mux.timing.reply, f"ending {channel.subject}"):
            channel.end(0)  # now, or as soon as it has started
            await _settle(channel)
            if channel.result is not None and channel.result.code is Code.DETACHED:
                channel = CommandChannel(mux, channel.id, None, subject=channel.subject)
                channel.abandon()
                channel.end(0)
                await mux.begin(channel)
                await _settle(channel)
    except (LinkLost, LinkTimeout, ProtocolViolation):
        return  # no caller is left to tell
    if channel.attachment is not None and channel.result is not None:
        mux.release(channel.id)


async def _settle(channel: CommandChannel) -> None:
    while channel.result is None and channel.error is None:
        await channel.changed.wait()
