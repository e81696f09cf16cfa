"""All channels over whichever connection there is: routes frames, redials when the connection breaks, resumes.

After a ProtocolViolation or a GOODBYE nothing is redialled: everybody who waits, and everybody who comes later, gets
that error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from k8e.link.channel import Channel, State
from k8e.link.dial import Dialer
from k8e.link.errors import LinkError, LinkLost, LinkTimeout, ProtocolViolation
from k8e.link.frames import ChannelFrame, Frame, FrameType, Order, Result
from k8e.link.streams import Bell
from k8e.link.wire import Dismissed, Wire

_FINAL: Final = (ProtocolViolation, Dismissed)
# RELEASE is not answered, so the latest are repeated over a new connection in case they were lost.
_RELEASES_REPEATED: Final = 256


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the link waits for what, in seconds."""

    handshake: float = 5.0
    reply: float = 60.0  # to a request, or for progress of one
    long_reply: float = 900.0  # to one that walks a whole tree
    margin: float = 10.0  # for a result, beyond what the command itself may take
    quiet: float = 5.0  # before a silent agent is asked whether it lives
    pong: float = 15.0  # for it to say so
    reconnect: float = 15.0  # from the break of the last useful connection to giving up
    stable: float = 0.2  # a connection that lasted this long was a good one
    first_backoff: float = 0.002
    last_backoff: float = 0.1


@asynccontextmanager
async def deadline(seconds: float | None, what: str) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise  # somebody else's
        raise LinkTimeout(f"{what}: nothing within {seconds} s") from None


class Switchboard:
    def __init__(self, dialer: Dialer, instance: bytes, timing: Timing) -> None:
        self.timing = timing
        self.failure: LinkError | None = None
        self.generation = 0  # that the agent chose
        self.bell = Bell()  # connected or failed
        self._dialer = dialer
        self._instance = instance
        self._wire: Wire | None = None
        self._channels: dict[int, Channel] = {}
        self._released: deque[int] = deque(maxlen=_RELEASES_REPEATED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff = timing.first_backoff
        self._connected_at = 0.0
        self._useful = False  # something was answered over this connection
        self._broken_since: float | None = None  # without a useful connection in between

    # Connections

    async def open(self, seconds: float) -> None:
        try:
            self._adopt(await self._dial_until(asyncio.get_running_loop().time() + seconds))
        except LinkError as error:
            self._fail(error)
            raise

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        self._fail(LinkLost("the link was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if wire is not None:
            await wire.close(1.0)

    @property
    def agent_version(self) -> str | None:
        return self._wire.agent.version if self._wire and self._wire.agent else None

    async def _dial_until(self, end: float) -> Wire:
        """Tries until somebody answers properly. The last failure is the one reported."""
        loop = asyncio.get_running_loop()
        failure: LinkError = LinkLost("no time left to connect")
        while loop.time() < end:
            try:
                return await self._dial(min(self.timing.handshake, end - loop.time()))
            except OSError as error:
                failure = LinkLost(f"no agent to connect to: {error}")
            except _FINAL:
                raise
            except LinkError as error:
                failure = error
            await self._back_off(max(0.0, end - loop.time()))
        raise failure

    async def _back_off(self, longest: float) -> None:
        await asyncio.sleep(min(self._backoff, longest))
        self._backoff = min(self._backoff * 2, self.timing.last_backoff)

    async def _dial(self, seconds: float) -> Wire:
        async with deadline(seconds, "dialling"):
            connection = await self._dialer()
        wire = Wire(self._instance, self._receive, self._pump_all, self._lost)
        try:
            await asyncio.get_running_loop().create_connection(lambda: wire, sock=connection)
            await wire.greeted(seconds)
        except BaseException:
            wire.end(LinkLost("given up during the handshake"))
            if not wire.connected:
                connection.close()
            raise
        return wire

    def _adopt(self, wire: Wire) -> None:
        self._wire = wire
        self.generation = wire.agent.generation if wire.agent else self.generation
        self._connected_at = asyncio.get_running_loop().time()
        self._useful = False
        for command in self._released:
            wire.post(Order(command, FrameType.RELEASE))
        for channel in self._channels.values():
            channel.resume()
        self._watch_pulse()
        self.bell.ring()

    def _lost(self, wire: Wire, reason: LinkError) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        if isinstance(reason, _FINAL):
            self._fail(reason)
            return
        for channel in list(self._channels.values()):
            channel.interrupt()
            if channel.state is State.DONE:
                del self._channels[channel.id]
        self.bell.ring()
        self.spawn(self._reconnect())

    async def _reconnect(self) -> None:
        now = asyncio.get_running_loop().time()
        lasted = self._broken_since is None or now - self._connected_at >= self.timing.stable
        # Over a connection that breaks again and again work can still get done; only one that is of no use is given up.
        if lasted or self._useful or self._broken_since is None:
            self._broken_since = now
        if lasted:
            self._backoff = self.timing.first_backoff
        else:
            # An agent that accepts and hangs up again must not keep us busy, whatever it says in between.
            await self._back_off(self.timing.last_backoff)
        try:
            self._adopt(await self._dial_until(self._broken_since + self.timing.reconnect))
        except _FINAL as error:
            self._fail(error)
        except LinkError as error:
            self._fail(LinkLost(f"the connection broke and there is no other: {error}"))

    def _fail(self, error: LinkError) -> None:
        self.failure = self.failure or error
        for channel in list(self._channels.values()):
            channel.fail(self.failure)
        self._channels.clear()
        self.bell.ring()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that goes on in the background, at most until the link is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Channels

    @property
    def queued(self) -> int:
        """Bytes that wait on our side for a consumer or for the agent, in all channels."""
        return sum(channel.queued for channel in self._channels.values())

    def new_id(self) -> int:
        return secrets.randbits(64) or 1

    def find(self, channel_id: int) -> Channel | None:
        return self._channels.get(channel_id)

    async def connected(self) -> Wire:
        """The connection, once there is one that takes more."""
        while True:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            wire = self._wire
            if wire is None:
                await self.bell.wait()
            elif wire.paused:
                # The failure of this one connection is not the end: look again.
                await wire.bell.wait()
            else:
                return wire

    async def begin(self, channel: Channel) -> None:
        await self.connected()
        self._channels[channel.id] = channel
        channel.begin()
        self._watch_pulse()

    def drop(self, channel: Channel) -> None:
        """Gives up a channel that is not a command. Until the agent has confirmed, it stays to swallow what still
        comes; with an agent that never confirms they would pile up."""
        channel.cancel()
        if channel.id in self._channels:
            asyncio.get_running_loop().call_later(self.timing.reply, self._expect_gone, channel)

    def _expect_gone(self, channel: Channel) -> None:
        if self._channels.get(channel.id) is channel and self._wire is not None:
            self._wire.end(ProtocolViolation(f"CANCEL of {channel.subject} was never answered"))

    @contextmanager
    def judge(self) -> Iterator[None]:
        """For what is understood only when it is consumed: a violation found then ends the link as any other."""
        try:
            yield
        except ProtocolViolation as violation:
            if self._wire is not None:
                self._wire.end(violation)
            raise

    def release(self, command: int) -> None:
        self._released.append(command)
        self.post(Order(command, FrameType.RELEASE))

    def _receive(self, frame: ChannelFrame) -> None:
        channel = self._channels.get(frame.id)
        if channel is None:
            raise ProtocolViolation(f"{type(frame).__name__} for channel {frame.id:#x}, which does not exist")
        self._useful = True
        channel.receive(frame)
        if isinstance(frame, Result) and channel.state is State.DONE:
            del self._channels[frame.id]
            self._watch_pulse()

    def _watch_pulse(self) -> None:
        """Silence matters only while something is outstanding: an idle link costs no timer."""
        if self._wire is None:
            return
        if self._channels:
            self._wire.start_pulse(self.timing.quiet, self.timing.pong)
        else:
            self._wire.stop_pulse()

    def _pump_all(self) -> None:
        for channel in self._channels.values():
            channel.pump()

    # Sender

    def post(self, frame: Frame) -> None:
        if self._wire is not None:
            self._wire.post(frame)

    def post_content(self, header: bytes, content: bytes) -> None:
        if self._wire is not None:
            self._wire.post_content(header, content)

    @property
    def flowing(self) -> bool:
        return self._wire is not None and self._wire.flowing
