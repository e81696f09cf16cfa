"""One connection to an agent: socket, handshake and keepalive.

It does not know channels. It ends exactly once and passes the reason to `ended`. A ProtocolViolation or a GOODBYE is
final; after any other reason the multiplexer may open another connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from k8e.link.codec.frames import (
    Ack,
    AgentHello,
    ChannelFrame,
    Data,
    Eof,
    Frame,
    Goodbye,
    GoodbyeReason,
    HostHello,
    Opened,
    Ping,
    Pong,
    Result,
    Side,
)
from k8e.link.codec.protocol import HIGHEST_GENERATION, LOWEST_GENERATION, NONCE_SIZE, FrameReader, encode
from k8e.link.errors import LinkError, LinkLost, LinkTimeout, ProtocolViolation
from k8e.link.streams import Notifier

_CHANNEL_FRAMES: Final = (Data, Ack, Eof, Opened, Result)


class GoodbyeReceived(LinkLost):
    """The agent said GOODBYE: the host must not reconnect."""


class LinkConnection(asyncio.BufferedProtocol):
    def __init__(
        self,
        instance: bytes,
        receive: Callable[[ChannelFrame], None],
        drained: Callable[[], None],
        ended: Callable[[LinkConnection, LinkError], None],
    ) -> None:
        self.agent: AgentHello | None = None
        self.failure: LinkError | None = None
        self.paused = False
        self.changed = Notifier()  # handshake complete, PONG received, failed, or writable again
        self._instance = instance
        self._receive = receive
        self._drained = drained
        self._ended = ended
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._reader = FrameReader(Side.AGENT)
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._heard = False
        self._keepalive: asyncio.TimerHandle | None = None
        # An agent remembers one PING: the second is sent after the answer to the first.
        self._pings = 0
        self._pongs = 0
        self._ping_wanted = False

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.post(HostHello(LOWEST_GENERATION, HIGHEST_GENERATION, self._nonce))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        try:
            for frame in self._reader.advance(nbytes):
                if isinstance(frame, _CHANNEL_FRAMES) and self.agent is not None:
                    self._receive(frame)
                else:
                    self._receive_own(frame)
                if self.failure is not None:
                    return
        except LinkError as error:
            self.end(error)

    def _receive_own(self, frame: Frame) -> None:
        if isinstance(frame, Goodbye):
            if frame.reason is GoodbyeReason.NO_COMMON_GENERATION:
                raise ProtocolViolation("the agent speaks no generation that we speak")
            raise GoodbyeReceived(f"the agent said goodbye: {frame.reason.name.lower().replace('_', ' ')}")
        if isinstance(frame, AgentHello) and self.agent is None:
            self._greet(frame)
        elif isinstance(frame, Pong) and frame.token == self._pings and self._pongs < self._pings:
            self._pongs = self._pings
            if self._ping_wanted:
                self._ping()
            self.changed.notify()
        else:
            raise ProtocolViolation(f"{type(frame).__name__} out of turn")

    def _greet(self, hello: AgentHello) -> None:
        if not secrets.compare_digest(hello.nonce, self._nonce):
            raise ProtocolViolation("the answer is not to our greeting: wrong nonce")
        if hello.generation == 0:
            raise ProtocolViolation("the agent speaks no generation that we speak")
        if not LOWEST_GENERATION <= hello.generation <= HIGHEST_GENERATION:
            raise ProtocolViolation(f"the agent chose generation {hello.generation}, which was not offered")
        if not secrets.compare_digest(hello.instance, self._instance):
            raise ProtocolViolation("this is another agent: wrong instance")
        self.agent = hello
        self.changed.notify()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.changed.notify()
        self._drained()

    def eof_received(self) -> None:
        self.end(LinkLost("the agent closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(LinkLost(f"the connection broke: {exc}" if exc else "the connection is closed"))
        if not self._closed.done():
            self._closed.set_result(None)

    # Called by the multiplexer

    def post(self, *frames: Frame) -> None:
        if self._transport is not None and self.failure is None:
            self._transport.write(b"".join(map(encode, frames)))

    def post_content(self, header: bytes, content: bytes) -> None:
        if self._transport is not None and self.failure is None:
            if len(content) < 4096:
                self._transport.write(header + content)
            else:
                self._transport.writelines((header, content))

    @property
    def connected(self) -> bool:
        """Whether there was a transport; then the transport closes the socket."""
        return self._transport is not None

    @property
    def flowing(self) -> bool:
        return self.failure is None and not self.paused

    def end(self, reason: LinkError) -> None:
        if self.failure is not None:
            return
        self.failure = reason
        self.stop_keepalive()
        if self._transport is not None:
            self._transport.abort()
        self.changed.notify()
        self._ended(self, reason)

    async def close(self, deadline: float) -> None:
        """Sends what was posted, then closes the connection."""
        if self.failure is None:
            self.failure = LinkLost("the link was closed")
            self.stop_keepalive()
            self.changed.notify()
        if self._transport is not None:
            self._transport.close()
            try:
                async with asyncio.timeout(deadline):
                    await asyncio.shield(self._closed)
            except TimeoutError:
                self._transport.abort()
                await self._closed

    async def complete_handshake(self, deadline: float) -> None:
        """Returns when the agent has answered HELLO."""
        try:
            async with asyncio.timeout(deadline):
                while self.agent is None:
                    self._check()
                    await self.changed.wait()
                self._check()
        except TimeoutError:
            raise LinkTimeout(f"the agent did not answer the greeting within {deadline} s") from None

    async def confirm(self) -> None:
        """Returns when the agent has processed everything posted so far."""
        if self._pongs == self._pings:
            self._ping()
            target = self._pings
        else:
            self._ping_wanted = True
            target = self._pings + 1
        while self._pongs < target:
            self._check()
            await self.changed.wait()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _ping(self) -> None:
        self._ping_wanted = False
        self._pings += 1
        self.post(Ping(self._pings))

    # Keepalive

    def start_keepalive(self, quiet: float, patience: float, wanted: Callable[[], bool]) -> None:
        """Sends a PING after `quiet` seconds of silence, and ends the connection after `patience` more; until it finds
        that this is not wanted any more."""
        if self.failure is None:
            self._heard = True
            if self._keepalive is None:
                self._beat(quiet, patience, wanted)

    def stop_keepalive(self) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None

    def _beat(self, quiet: float, patience: float, wanted: Callable[[], bool], asked: bool = False) -> None:
        if not wanted():
            self._keepalive = None
            return
        if asked and not self._heard:
            self.end(LinkTimeout(f"the agent was silent for {quiet + patience} s"))
            return
        asking = not self._heard
        if asking and self._pongs == self._pings:
            self._ping()
        self._heard = False
        loop = asyncio.get_running_loop()
        self._keepalive = loop.call_later(patience if asking else quiet, self._beat, quiet, patience, wanted, asking)
