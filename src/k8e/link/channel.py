"""A channel: one request and everything that belongs to it, until its RESULT.

It receives frames and posts frames; it never waits for a socket. A `Channel` ends with its connection, a
`CommandChannel` does not.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

from k8e.link.codec.frames import Ack, ChannelFrame, Data, Eof, Frame, FrameType, Opened, Order, Request, Result
from k8e.link.codec.protocol import OUTPUT, OUTPUT_WINDOW, TO_SANDBOX, encode_data_header
from k8e.link.errors import AgentError, Code, LinkError, LinkLost, ProtocolViolation
from k8e.link.streams import Inbound, Notifier, Outbound


class Interrupted(LinkLost):
    """The connection broke during the request; a caller that knows it to be repeatable may repeat it."""


class Sender(Protocol):
    """The connection as channels see it. A frame posted while there is none is dropped: resuming makes up for it."""

    def post(self, frame: Frame) -> None: ...
    def post_content(self, header: bytes, content: bytes) -> None: ...
    @property
    def flowing(self) -> bool:
        """Whether there is a connection with room to write."""


class State(enum.Enum):
    IDLE = "idle"  # not on this connection yet
    ASKED = "asked"
    OPEN = "open"
    DONE = "done"


# The frames that may arrive in each state.
LEGAL: Final[dict[State, frozenset[type]]] = {
    State.IDLE: frozenset(),
    State.ASKED: frozenset({Opened, Result}),
    State.OPEN: frozenset({Data, Eof, Ack, Result}),
    State.DONE: frozenset(),
}

# Requests that are answered by RESULT alone.
_BRIEF: Final = frozenset(
    {
        *(FrameType.STAT, FrameType.MKDIR, FrameType.MOVE, FrameType.REMOVE, FrameType.CHMOD),
        *(FrameType.PARK, FrameType.BIND),
    }
)
_WITH_OUTPUT: Final = frozenset(
    {FrameType.READ, FrameType.LIST, FrameType.WATCH, FrameType.CONNECT, FrameType.COMMANDS}
)
_WITH_INPUT: Final = frozenset({FrameType.WRITE, FrameType.CONNECT})


class Channel:
    _pumping = frozenset({State.ASKED, State.OPEN})  # content may overtake OPENED

    def __init__(self, sender: Sender, request: Request, subject: str) -> None:
        self.id = request.id
        self.subject = subject  # for people
        self.state = State.IDLE
        self.opened: bytes | None = None
        self.result: Result | None = None
        self.error: LinkError | None = None
        self.inbound: dict[int, Inbound] = {}
        self.outbound: Outbound | None = None
        self.abandoned = False
        self.changed = Notifier()  # opened, result or error changed
        self._sender = sender
        self._request = request
        self._eof_posted = False
        if request.type in _WITH_OUTPUT:
            self.inbound[OUTPUT] = self._make_inbound(OUTPUT, OUTPUT_WINDOW)
        if request.type in _WITH_INPUT:
            self.outbound = Outbound()

    def _make_inbound(self, stream: int, window: int, start: int = 0, *, hold: bool = False, keep: int = 0) -> Inbound:
        silent = hold and not keep
        acknowledge = None if silent else lambda offset: self._sender.post(Ack(self.id, stream, offset))
        return Inbound(window, acknowledge, start, keep)

    @property
    def output(self) -> Inbound:
        return self.inbound[OUTPUT]

    @property
    def input(self) -> Outbound:
        assert self.outbound is not None
        return self.outbound

    @property
    def queued(self) -> int:
        """Bytes that wait here, in both directions."""
        incoming = sum(stream.queued for stream in self.inbound.values())
        return incoming + (self.outbound.queued if self.outbound and not self.outbound.broken else 0)

    # Frames from the agent

    def receive(self, frame: ChannelFrame) -> None:
        kind = type(frame)
        if kind not in LEGAL[self.state]:
            raise ProtocolViolation(f"{kind.__name__} for {self.subject}, which is {self.state.value}")
        if isinstance(frame, Data):
            self._get_stream(frame.stream).receive(frame.offset, frame.content)
        elif isinstance(frame, Eof):
            if frame.stream == TO_SANDBOX:
                self._get_outbound().abort(frame.offset)
            else:
                self._get_stream(frame.stream).finish(frame.offset)
        elif isinstance(frame, Ack):
            self._get_outbound().acknowledge(frame.offset)
            self.pump()
        elif isinstance(frame, Opened):
            self._receive_opened(frame.payload)
        else:
            self._receive_result(frame)

    def _get_stream(self, stream: int) -> Inbound:
        try:
            return self.inbound[stream]
        except KeyError:
            raise ProtocolViolation(f"{self.subject} has no stream {stream}") from None

    def _get_outbound(self) -> Outbound:
        if self.outbound is None:
            raise ProtocolViolation(f"{self.subject} takes no input")
        return self.outbound

    def _receive_opened(self, payload: bytes) -> None:
        if self._request.type in _BRIEF:
            raise ProtocolViolation(f"OPENED for {self.subject}")
        if payload and self._request.type is not FrameType.READ:
            raise ProtocolViolation(f"OPENED for {self.subject} has a payload")
        self.opened = payload
        self.state = State.OPEN
        self.changed.notify()
        self.pump()

    def _receive_result(self, result: Result) -> None:
        if result.code is Code.OK:
            if self.state is not State.OPEN and self._request.type not in _BRIEF:
                raise ProtocolViolation(f"RESULT for {self.subject} before OPENED")
            if not all(stream.ended for stream in self.inbound.values()):
                raise ProtocolViolation(f"RESULT for {self.subject} before EOF")
            if self._request.type is FrameType.WRITE and not self._eof_posted:
                raise ProtocolViolation(f"RESULT for {self.subject} before we were through")
        elif len(result.payload) not in (0, 4):
            raise ProtocolViolation(f"RESULT for {self.subject} has the wrong size")
        self._finish(result)

    def _finish(self, result: Result) -> None:
        self.state = State.DONE
        self.result = result
        if result.code is not Code.OK:
            error = self.describe(result)
            for stream in self.inbound.values():
                stream.fail(error)
        if self.outbound is not None:
            self.outbound.stop()
        self.changed.notify()

    def describe(self, result: Result) -> AgentError:
        return AgentError(result.code, result.errno, self.subject)

    # Called by the multiplexer

    def begin(self) -> None:
        """Posts the request."""
        self._sender.post(self._request)
        self.state = State.ASKED

    def resume(self) -> None:
        """Called when there is a new connection."""

    def interrupt(self) -> None:
        """Called when the connection broke."""
        self.fail(Interrupted(f"the connection broke: it is not known whether {self.subject} happened"))

    def fail(self, error: LinkError) -> None:
        self.state = State.DONE
        self.error = error
        for stream in self.inbound.values():
            stream.fail(error)
        if self.outbound is not None:
            self.outbound.fail(error)
        self.changed.notify()

    def pump(self) -> None:
        """Posts the content that is due, as far as the connection takes it."""
        outbound = self.outbound
        if outbound is None or outbound.broken or self.state not in self._pumping:
            return
        while self._sender.flowing and (piece := outbound.take()) is not None:
            offset, content = piece
            self._sender.post_content(encode_data_header(self.id, TO_SANDBOX, offset, len(content)), content)
        if outbound.end == outbound.sent and not self._eof_posted:
            self._sender.post(Eof(self.id, TO_SANDBOX, outbound.sent))
            self._eof_posted = True

    # Called by the caller

    async def wait_opened(self) -> bytes:
        while self.opened is None:
            self._check()
            await self.changed.wait()
        return self.opened

    async def wait_result(self) -> bytes:
        """Returns the payload of RESULT; raises the agent's refusal."""
        while self.result is None:
            self._check()
            await self.changed.wait()
        self._check()
        return self.result.payload

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.result is not None and self.result.code is not Code.OK:
            raise self.describe(self.result)

    async def write(self, content: bytes | memoryview) -> None:
        await self.input.write(content, self.pump)

    def close_input(self) -> None:
        self.input.close()
        self.pump()

    def cancel(self) -> None:
        """Cancels the request. The id stays taken until the agent has confirmed."""
        if self.state in (State.IDLE, State.DONE) or self.abandoned:
            return
        self.abandon()
        for stream in self.inbound.values():
            stream.fail(LinkLost(f"{self.subject} was given up"))  # so that nothing more is acknowledged
        self._sender.post(Order(self.id, FrameType.CANCEL))

    def abandon(self) -> None:
        self.abandoned = True
        for stream in self.inbound.values():
            stream.divert(_drop)
        if self.outbound is not None:
            self.outbound.stop()


def _drop(_content: bytes) -> None:
    pass
