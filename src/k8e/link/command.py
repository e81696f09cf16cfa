"""A command: the process that its caller uses, and its channel, which outlives its connection and is resumed over the
next one."""

from __future__ import annotations

import asyncio

from k8e.link.channel import Channel, Sender, State
from k8e.link.codec.frames import End, FrameType, Order, Request, Resize, Result, Signal
from k8e.link.codec.protocol import ERRORS, OUTPUT
from k8e.link.codec.records import MAX_SIGNAL, Attachment, parse_attachment, parse_outcome, parse_stage
from k8e.link.codec.requests import effective_window, encode_attach, encode_exec, milliseconds
from k8e.link.errors import AgentError, Code, LinkLost, LinkTimeout, NotStarted, ProtocolViolation, Stage, shown
from k8e.link.model import ExecSpec, Outcome, Scope, TerminalSize
from k8e.link.multiplexer import Multiplexer, deadline
from k8e.link.streams import Inbound, Outbound


class CommandChannel(Channel):
    _pumping = frozenset({State.OPEN})  # where stdin goes on is in OPENED

    def __init__(
        self,
        sender: Sender,
        command: int,
        spec: ExecSpec | None,
        starts: tuple[int, int] = (0, 0),
        subject: str = "",
        *,
        hold: bool = False,
        keep: int = 0,
        environment: bytes | None = None,
    ) -> None:
        """Without a spec the command runs already: the channel attaches to it and reads its output from `starts` on.
        With `hold` the agent keeps what was read, or the last `keep` bytes of it. `environment`: the spec's, where that
        is encoded already."""
        self._hold = hold
        self._may_be_parked = spec is not None and spec.parked
        self._directory = spec.cwd if spec is not None else b""
        if spec is None:
            request = Request(command, FrameType.ATTACH, encode_attach(*starts))
            # An earlier daemon chose the window; this one does not know it.
            window = effective_window(1 << 20)
        else:
            request = Request(command, FrameType.EXEC, encode_exec(spec, environment))
            window = effective_window(spec.window)
        super().__init__(sender, request, subject or f"command {command:016x}")
        self.inbound = {
            OUTPUT: self._make_inbound(OUTPUT, window, starts[0], hold=hold, keep=keep),
            ERRORS: self._make_inbound(ERRORS, window, starts[1], hold=hold, keep=keep),
        }
        self.outbound = Outbound()
        self.attachment: Attachment | None = None  # the first one
        self.outcome: Outcome | None = None
        self.detaching = False
        self._asked: FrameType | None = None  # what OPENED or RESULT will answer
        self._ending: int | None = None
        self._size: TerminalSize | None = None

    def begin(self) -> None:
        super().begin()
        self._asked = self._request.type

    def resume(self) -> None:
        offsets = (self.inbound[OUTPUT].resume_offset(), self.inbound[ERRORS].resume_offset())
        # Also when EXEC may not have arrived: only the agent knows, and a command runs once.
        self._sender.post(Request(self.id, FrameType.ATTACH, encode_attach(*offsets)))
        self._asked = FrameType.ATTACH
        self.state = State.ASKED

    def interrupt(self) -> None:
        if self.detaching:
            self._finish(Result(self.id, Code.DETACHED, 0, b""))
        elif self._hold:
            # Going on in the middle would acknowledge what lies before. The caller can read all of it again.
            super().interrupt()
        else:
            self.state = State.IDLE

    def _receive_opened(self, payload: bytes) -> None:
        attachment = parse_attachment(payload)
        starts = (attachment.stdout_start, attachment.stderr_start)
        assert self.outbound is not None
        if self._asked is FrameType.EXEC:
            if any(starts) or attachment.received > self.outbound.sent:
                raise ProtocolViolation("a new command has a past")
            if attachment.handed_over and not self._may_be_parked:
                raise ProtocolViolation("a command was handed over that was not to be")
        else:
            if self.attachment is None and self._request.type is FrameType.ATTACH:
                self.outbound.adopt(attachment.received)
            else:
                self.outbound.resume(attachment.received)
            self.inbound[OUTPUT].reattach(starts[0])
            self.inbound[ERRORS].reattach(starts[1])
        self.attachment = self.attachment or attachment
        self.opened = payload
        self.state = State.OPEN
        self._eof_posted = False
        self._repeat_orders()
        self.changed.notify()
        self.pump()

    def _repeat_orders(self) -> None:
        """Posts again the orders that are harmless twice: they may have been lost with the connection."""
        if self._ending is not None:
            self._sender.post(End(self.id, self._ending))
        if self._size is not None:
            self._sender.post(Resize(self.id, self._size.rows, self._size.columns))

    def _receive_result(self, result: Result) -> None:
        if self.attachment is None and result.code is Code.UNKNOWN_COMMAND and self._may_exec_again():
            self.begin()
            return
        if result.code is Code.OK:
            outcome = parse_outcome(result.payload)
            totals = (self.inbound[OUTPUT].total, self.inbound[ERRORS].total)
            if self.state is State.OPEN and totals != (outcome.stdout_bytes, outcome.stderr_bytes):
                raise ProtocolViolation(f"RESULT for {self.subject} contradicts EOF")
            self.outcome = outcome
        super()._receive_result(result)

    def _may_exec_again(self) -> bool:
        return self._request.type is FrameType.EXEC and self._asked is FrameType.ATTACH and not self.abandoned

    def describe(self, result: Result) -> AgentError:
        if self._asked is FrameType.EXEC and self.attachment is None:
            # A refusal that comes before the request is looked at has no stage.
            stage = parse_stage(result.payload) if result.payload else Stage.REQUEST
            subject = shown(self._directory) if stage is Stage.CWD else self.subject
            return NotStarted(result.code, result.errno, stage, subject)
        return super().describe(result)

    # Called by the caller

    def end(self, grace_ms: int) -> None:
        """Ends the command, also over a later connection."""
        self._ending = grace_ms
        if self.state is State.OPEN:
            self._sender.post(End(self.id, grace_ms))

    def resize(self, size: TerminalSize) -> None:
        self._size = size
        if self.state is State.OPEN:
            self._sender.post(Resize(self.id, size.rows, size.columns))

    def detach(self) -> None:
        self.detaching = True
        if self.state is State.OPEN:
            self._sender.post(Order(self.id, FrameType.DETACH))
        elif self.state is State.IDLE:
            self.interrupt()


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
    def copied(self) -> bool:
        assert self._channel.attachment is not None
        return self._channel.attachment.copied

    @property
    def ended(self) -> bool:
        return self._channel.result is not None or self._channel.error is not None

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
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None  # not asyncio.timeout: for a short command that is half of the wait
        try:
            while not self.ended:
                if self._due is not None and loop.time() >= self._due:
                    progress = self.stdout.received + self.stderr.received
                    unread = self.stdout.queued + self.stderr.queued
                    if self._channel.state is State.OPEN and not unread and progress == heard:
                        raise LinkTimeout(f"{self._channel.subject} should have ended by now")
                    heard = progress
                    self._due = loop.time() + self._mux.timing.margin
                if self._due is not None and (timer is None or timer.when() != self._due):
                    if timer is not None:
                        timer.cancel()
                    timer = loop.call_at(self._due, self._channel.changed.notify)
                await self._channel.changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
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
