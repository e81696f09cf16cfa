"""Multiplexes all channels over the current connection: routes frames, redials when the connection breaks, resumes.

After a ProtocolViolation or a GOODBYE it does not redial: every waiting and every later call raises that error.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, cast

from k8e.link.channel import Channel, State
from k8e.link.codec.frames import ChannelFrame, Frame, FrameType, Order, Result
from k8e.link.codec.requests import Environments
from k8e.link.connection import GoodbyeReceived, LinkConnection
from k8e.link.dial import Dialer
from k8e.link.errors import LinkError, LinkLost, LinkTimeout, ProtocolViolation
from k8e.link.streams import Notifier

_FINAL: Final = (ProtocolViolation, GoodbyeReceived)
# RELEASE is not answered, so the latest are repeated over a new connection in case they were lost.
_RELEASES_REPEATED: Final = 256
# Seconds in which a RELEASE waits for another frame to go with: alone it would wake the agent for nothing.
_RELEASE_DELAY: Final = 0.1


@dataclass(frozen=True, slots=True)
class Timing:
    """The deadlines of the link, in seconds."""

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


class deadline:  # noqa: N801 - used like asyncio.timeout
    """Ends the block after so many seconds, with LinkTimeout. A class, because every command waits within one, and a
    generator would cost it twice as much."""

    __slots__ = ("_limit", "_seconds", "_what")

    def __init__(self, seconds: float | None, what: str) -> None:
        self._seconds = seconds
        self._what = what
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        over = False
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            over = True
        # Else a TimeoutError is that of a caller further up, and goes on.
        if over or (isinstance(error, TimeoutError) and self._limit.expired()):
            raise LinkTimeout(f"{self._what}: nothing within {self._seconds} s") from None


class Multiplexer:
    def __init__(self, dialer: Dialer, instance: bytes, timing: Timing) -> None:
        self.timing = timing
        self.failure: LinkError | None = None
        self.generation = 0  # that the agent chose
        self.changed = Notifier()  # connected or failed
        self.environments = Environments()
        self._dialer = dialer
        self._instance = instance
        self._connection: LinkConnection | None = None
        self._channels: dict[int, Channel] = {}
        self._released: deque[int] = deque(maxlen=_RELEASES_REPEATED)
        self._unsent: list[Frame] = []  # RELEASEs
        self._releasing: asyncio.TimerHandle | None = None
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
        self._send_releases()
        connection, self._connection = self._connection, None
        self._fail(LinkLost("the link was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            await connection.close(1.0)

    @property
    def agent_version(self) -> str | None:
        return self._connection.agent.version if self._connection and self._connection.agent else None

    async def _dial_until(self, end: float) -> LinkConnection:
        """Tries until an agent completes the handshake. The last failure is the one reported."""
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

    async def _dial(self, seconds: float) -> LinkConnection:
        async with deadline(seconds, "dialling"):
            dialled = await self._dialer()
        connection = LinkConnection(self._instance, self._receive, self._pump_all, self._lost)
        if isinstance(dialled, socket.socket):
            stream, protocol = dialled, cast("asyncio.BaseProtocol", connection)
        else:
            stream, protocol = dialled.socket, dialled.carry(connection)
        try:
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=stream)
            await connection.complete_handshake(seconds)
        except BaseException:
            connection.end(LinkLost("given up during the handshake"))
            if not connection.connected:
                stream.close()
            raise
        return connection

    def _adopt(self, connection: LinkConnection) -> None:
        self._connection = connection
        self.generation = connection.agent.generation if connection.agent else self.generation
        self._connected_at = asyncio.get_running_loop().time()
        self._useful = False
        self._unsent.clear()
        connection.post(*(Order(command, FrameType.RELEASE) for command in self._released))
        for channel in self._channels.values():
            channel.resume()
        self._start_keepalive()
        self.changed.notify()

    def _lost(self, connection: LinkConnection, reason: LinkError) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if isinstance(reason, _FINAL):
            self._fail(reason)
            return
        for channel in list(self._channels.values()):
            channel.interrupt()
            if channel.state is State.DONE:
                del self._channels[channel.id]
        self.changed.notify()
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
            # An agent that accepts and closes again and again must not keep the daemon busy.
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
        self.changed.notify()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in the background, at most until the link is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Channels

    @property
    def queued(self) -> int:
        """Bytes that wait in the daemon for a consumer or for the agent, in all channels."""
        return sum(channel.queued for channel in self._channels.values())

    def new_id(self) -> int:
        return secrets.randbits(64) or 1

    def find(self, channel_id: int) -> Channel | None:
        return self._channels.get(channel_id)

    async def connected(self) -> LinkConnection:
        """Returns the connection, once there is one with room to write."""
        while True:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            connection = self._connection
            if connection is None:
                await self.changed.wait()
            elif connection.paused:
                # The failure of this one connection is not the end: look again.
                await connection.changed.wait()
            else:
                return connection

    async def begin(self, channel: Channel) -> None:
        await self.connected()
        self._channels[channel.id] = channel
        channel.begin()
        self._start_keepalive()

    def drop(self, channel: Channel) -> None:
        """Gives up a channel that is not a command. The channel stays, and discards what still arrives, until the agent
        has confirmed; an agent that never confirms loses its connection, or such channels would accumulate."""
        channel.cancel()
        if channel.id in self._channels:
            asyncio.get_running_loop().call_later(self.timing.reply, self._expect_gone, channel)

    def _expect_gone(self, channel: Channel) -> None:
        if self._channels.get(channel.id) is channel and self._connection is not None:
            self._connection.end(ProtocolViolation(f"CANCEL of {channel.subject} was never answered"))

    @contextmanager
    def close_on_violation(self) -> Iterator[None]:
        """Ends the connection when the block finds a violation: some content is parsed only when it is consumed."""
        try:
            yield
        except ProtocolViolation as violation:
            if self._connection is not None:
                self._connection.end(violation)
            raise

    def release(self, command: int) -> None:
        """Sent with the next frame, or a moment later."""
        self._released.append(command)
        self._unsent.append(Order(command, FrameType.RELEASE))
        if self._releasing is None:
            self._releasing = asyncio.get_running_loop().call_later(_RELEASE_DELAY, self._send_releases)

    def _send_releases(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None
        self.post()

    def _receive(self, frame: ChannelFrame) -> None:
        channel = self._channels.get(frame.id)
        if channel is None:
            raise ProtocolViolation(f"{type(frame).__name__} for channel {frame.id:#x}, which does not exist")
        self._useful = True
        channel.receive(frame)
        if isinstance(frame, Result) and channel.state is State.DONE:
            del self._channels[frame.id]

    def _start_keepalive(self) -> None:
        """Watches for silence only while a request is outstanding: an idle link costs no timer."""
        if self._connection is not None and self._channels:
            self._connection.start_keepalive(self.timing.quiet, self.timing.pong, lambda: bool(self._channels))

    def _pump_all(self) -> None:
        for channel in self._channels.values():
            channel.pump()

    # Sender

    def post(self, *frames: Frame) -> None:
        if self._unsent:
            frames = (*self._unsent, *frames)
            self._unsent.clear()
        if self._connection is not None:
            self._connection.post(*frames)

    def post_content(self, header: bytes, content: bytes) -> None:
        if self._connection is not None:
            self._connection.post_content(header, content)

    @property
    def flowing(self) -> bool:
        return self._connection is not None and self._connection.flowing
