"""Connections to sockets inside the sandbox, and watched paths."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator

from k8e.link.channel import Channel, Interrupted
from k8e.link.codec.frames import Request
from k8e.link.codec.records import IN_Q_OVERFLOW, RecordReader, parse_event
from k8e.link.codec.requests import FileRequest
from k8e.link.model import WatchEvent
from k8e.link.multiplexer import Multiplexer, deadline


class AgentConnection:
    """Implements `model.Connection`. Ends with the connection to the agent."""

    def __init__(self, mux: Multiplexer, channel: Channel) -> None:
        self._mux = mux
        self._channel = channel

    async def read(self) -> bytes:
        return await self._channel.output.read()

    async def write(self, data: bytes) -> None:
        await self._channel.write(data)

    async def close_write(self) -> None:
        self._channel.close_input()

    async def close(self) -> None:
        self._mux.drop(self._channel)


class AgentWatcher:
    """Implements `model.Watcher`. Reports a broken connection as lost events."""

    def __init__(self, mux: Multiplexer, request: FileRequest) -> None:
        self._mux = mux
        self._request = request
        self._channel: Channel | None = None
        self._reader = RecordReader(parse_event)
        self._events: deque[WatchEvent] = deque()
        self._closed = False

    async def open(self) -> None:
        """Returns once the watch is in place."""
        subject = f"watch {self._request.path!r}"
        async with deadline(self._mux.timing.reply, subject):
            while True:
                request = Request(self._mux.new_id(), self._request.operation, self._request.encode())
                channel = Channel(self._mux, request, subject)
                try:
                    await self._mux.begin(channel)
                    await channel.wait_opened()
                except Interrupted:
                    continue
                except BaseException:
                    self._mux.drop(channel)
                    raise
                self._channel = channel
                self._reader = RecordReader(parse_event)
                return

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            channel = self._channel
            if self._closed or channel is None:
                raise StopAsyncIteration
            try:
                content = await channel.output.read()
            except Interrupted:
                await self.open()
                return WatchEvent(IN_Q_OVERFLOW, 0, b"", overflow=True)
            if self._closed:
                raise StopAsyncIteration
            with self._mux.close_on_violation():
                if not content:
                    self._reader.finish()
                    raise StopAsyncIteration
                self._events.extend(self._reader.feed(content))
        return self._events.popleft()

    async def close(self) -> None:
        self._closed = True
        self._events.clear()
        if self._channel is not None:
            self._mux.drop(self._channel)
