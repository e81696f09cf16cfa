"""The channel of a command: it outlives its connection and is resumed over the next one."""

from __future__ import annotations

from k8e.link.channel import Channel, Sender, State
from k8e.link.codec.frames import End, FrameType, Order, Request, Resize, Result
from k8e.link.codec.protocol import ERRORS, OUTPUT
from k8e.link.codec.records import Attachment, parse_attachment, parse_outcome, parse_stage
from k8e.link.codec.requests import effective_window, encode_attach, encode_exec
from k8e.link.errors import AgentError, Code, NotStarted, ProtocolViolation, Stage, shown
from k8e.link.model import ExecSpec, Outcome, TerminalSize
from k8e.link.streams import Outbound


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
    ) -> None:
        """Without a spec the command runs already: the channel attaches to it and reads its output from `starts` on.
        With `hold` the agent keeps what was read."""
        self._hold = hold
        self._may_be_parked = spec is not None and spec.parked
        self._directory = spec.cwd if spec is not None else b""
        if spec is None:
            request = Request(command, FrameType.ATTACH, encode_attach(*starts))
            # An earlier daemon chose the window; this one does not know it.
            window = effective_window(1 << 20)
        else:
            request = Request(command, FrameType.EXEC, encode_exec(spec))
            window = effective_window(spec.window)
        super().__init__(sender, request, subject or f"command {command:016x}")
        self.inbound = {
            OUTPUT: self._make_inbound(OUTPUT, window, starts[0], hold=hold),
            ERRORS: self._make_inbound(ERRORS, window, starts[1], hold=hold),
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
