"""Files and sockets inside the sandbox: the part of `model.Sandbox` that is not about commands.

What only reads, or does the same when done twice, is repeated when the connection breaks under it. Everything else says
that it is not known whether it happened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from k8e.link.channel import Channel, Interrupted
from k8e.link.codec.frames import FrameType, Request
from k8e.link.codec.protocol import BINDING_GENERATION
from k8e.link.codec.records import RecordReader, parse_count, parse_entry, parse_only_entry
from k8e.link.codec.requests import KEEP_MODE, TO_THE_END, FileRequest
from k8e.link.errors import AgentError, BrokenInput, Code, LinkLost, ProtocolViolation, shown
from k8e.link.model import AGENT, Entry, Identity
from k8e.link.multiplexer import Multiplexer, deadline
from k8e.link.sockets import AgentConnection, AgentWatcher

_PIECE: Final = 1 << 20
_WRITABLE_BIND: Final = 1
_LAST_BIND: Final = 2
_FRUITLESS: Final = 8  # repetitions without progress
_MAX_LISTING: Final = 64 << 20  # bytes of names in one answer

T = TypeVar("T")


class Files:
    def __init__(self, mux: Multiplexer) -> None:
        self._mux = mux

    # How requests are made

    def _make(self, request: FileRequest, subject: str) -> Channel:
        return Channel(self._mux, Request(self._mux.new_id(), request.operation, request.encode()), subject)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await attempt()
            except Interrupted:
                continue

    async def _ask(
        self, request: FileRequest, subject: str, *, repeatable: bool = False, seconds: float | None = None
    ) -> bytes:
        """A request that is answered by its RESULT alone."""

        async def attempt() -> bytes:
            channel = self._make(request, subject)
            try:
                await self._mux.begin(channel)
                return await channel.wait_result()
            finally:
                self._mux.drop(channel)

        async with deadline(seconds or self._mux.timing.reply, subject):
            return await self._repeat(attempt) if repeatable else await attempt()

    async def _order(
        self, request: FileRequest, subject: str, *, repeatable: bool = False, seconds: float | None = None
    ) -> None:
        if await self._ask(request, subject, repeatable=repeatable, seconds=seconds):
            with self._mux.close_on_violation():
                raise ProtocolViolation(f"RESULT of {subject} has the wrong size")

    async def _read_some(self, channel: Channel) -> bytes:
        """The next content, which is never long in coming."""
        if channel.output.ready:
            return await channel.output.read()
        async with deadline(self._mux.timing.reply, channel.subject):
            return await channel.output.read()

    async def _open(self, channel: Channel) -> bytes:
        async with deadline(self._mux.timing.reply, channel.subject):
            await self._mux.begin(channel)
            return await channel.wait_opened()

    async def _close(self, channel: Channel) -> bytes:
        async with deadline(self._mux.timing.reply, channel.subject):
            return await channel.wait_result()

    # Content

    async def read_stream(
        self, path: bytes, *, offset: int = 0, length: int | None = None, identity: Identity = AGENT
    ) -> AsyncGenerator[bytes, None]:
        subject = f"read {shown(path)}"
        given = fruitless = 0
        first: Entry | None = None
        while True:
            rest = TO_THE_END if length is None else length - given
            request = FileRequest(FrameType.READ, path, offset=offset + given, length=rest, identity=identity)
            channel = self._make(request, subject)
            before = given
            try:
                opened = await self._open(channel)
                with self._mux.close_on_violation():
                    entry = parse_only_entry(opened)
                first = first or entry
                if entry != first:
                    raise LinkLost(f"{subject}: the connection broke, and the file has changed since")
                while content := await self._read_some(channel):
                    given += len(content)
                    if length is not None and given > length:
                        with self._mux.close_on_violation():
                            raise ProtocolViolation(f"{subject} gave more than was asked for")
                    yield content
                await self._close(channel)
                return
            except Interrupted:
                fruitless = fruitless + 1 if given == before else 0
                if fruitless > _FRUITLESS:
                    raise
            finally:
                self._mux.drop(channel)

    async def read_file(
        self,
        path: bytes,
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = 64 << 20,
        identity: Identity = AGENT,
    ) -> bytes:
        """All of it, or TOO_BIG if that is more than `limit`."""
        chunks: list[bytes] = []
        size = 0
        stream = self.read_stream(path, offset=offset, length=length, identity=identity)
        try:
            async for content in stream:
                size += len(content)
                if size > limit:
                    raise AgentError(Code.TOO_BIG, subject=f"read {shown(path)}: more than {limit} bytes")
                chunks.append(content)
        finally:
            await stream.aclose()
        return b"".join(chunks)

    async def write_file(
        self,
        path: bytes,
        content: bytes | AsyncIterable[bytes],
        *,
        append: bool = False,
        exclusive: bool = False,
        mode: int | None = None,
        identity: Identity = AGENT,
    ) -> int:
        if mode is not None and not 0 <= mode <= 0o7777:
            raise ValueError(f"mode is {mode:o}")
        request = FileRequest(
            FrameType.WRITE,
            path,
            flags=append | exclusive << 1,
            mode=KEEP_MODE if mode is None else mode,
            identity=identity,
        )
        channel = self._make(request, f"write {shown(path)}")
        try:
            async with deadline(self._mux.timing.reply, channel.subject):
                await self._mux.begin(channel)
            try:
                if isinstance(content, bytes | bytearray | memoryview):
                    await self._write_pieces(channel, bytes(content))
                else:
                    async for part in content:
                        await self._write_pieces(channel, part)
                channel.close_input()
            except BrokenInput:
                pass  # RESULT says why
            payload = await self._close(channel)
            with self._mux.close_on_violation():
                return parse_count(payload)
        finally:
            self._mux.drop(channel)

    async def _write_pieces(self, channel: Channel, content: bytes) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _PIECE):
            async with deadline(self._mux.timing.reply, channel.subject):
                await channel.write(view[start : start + _PIECE])

    # Directories

    async def list_stream(
        self, path: bytes, *, recursive: bool = False, identity: Identity = AGENT
    ) -> AsyncGenerator[Entry, None]:
        request = FileRequest(FrameType.LIST, path, flags=int(recursive), identity=identity)
        given = fruitless = 0
        while True:
            channel = self._make(request, f"list {shown(path)}")
            reader = RecordReader(parse_entry)
            try:
                await self._open(channel)
                while content := await self._read_some(channel):
                    with self._mux.close_on_violation():
                        entries = reader.feed(content)
                    for entry in entries:
                        given += 1
                        yield entry
                payload = await self._close(channel)
                with self._mux.close_on_violation():
                    reader.finish()
                    if parse_count(payload) != given:
                        raise ProtocolViolation(f"{channel.subject} counted wrongly")
                return
            except Interrupted:
                fruitless += 1
                if given or fruitless > _FRUITLESS:
                    raise
            finally:
                self._mux.drop(channel)

    async def list_dir(
        self, path: bytes, *, recursive: bool = False, limit: int = 100_000, identity: Identity = AGENT
    ) -> list[Entry]:
        """All of it, or TOO_BIG if there are more than `limit`."""
        found: list[Entry] = []
        size = 0
        stream = self.list_stream(path, recursive=recursive, identity=identity)
        try:
            async for entry in stream:
                size += len(entry.name) + len(entry.target or b"")
                if len(found) >= limit or size > _MAX_LISTING:
                    raise AgentError(Code.TOO_BIG, subject=f"list {shown(path)}: more than {len(found)} entries")
                found.append(entry)
        finally:
            await stream.aclose()
        return found

    async def stat(self, path: bytes, *, follow: bool = True, identity: Identity = AGENT) -> Entry:
        request = FileRequest(FrameType.STAT, path, flags=int(follow), identity=identity)
        payload = await self._ask(request, f"stat {shown(path)}", repeatable=True)
        with self._mux.close_on_violation():
            return parse_only_entry(payload)

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = True, identity: Identity = AGENT) -> None:
        request = FileRequest(FrameType.MKDIR, path, flags=int(parents), mode=mode, identity=identity)
        await self._order(request, f"mkdir {shown(path)}", repeatable=parents)

    async def move(self, source: bytes, target: bytes, *, replace: bool = True, identity: Identity = AGENT) -> None:
        request = FileRequest(FrameType.MOVE, source, target, flags=int(not replace), identity=identity)
        await self._order(request, f"move {shown(source)} to {shown(target)}")

    async def remove(self, path: bytes, *, recursive: bool = False, identity: Identity = AGENT) -> None:
        request = FileRequest(FrameType.REMOVE, path, flags=int(recursive), identity=identity)
        seconds = self._mux.timing.long_reply if recursive else None
        await self._order(request, f"remove {shown(path)}", seconds=seconds)

    async def chmod(self, path: bytes, mode: int, *, identity: Identity = AGENT) -> None:
        request = FileRequest(FrameType.CHMOD, path, mode=mode, identity=identity)
        await self._order(request, f"chmod {shown(path)}", repeatable=True)

    # Mounts

    async def bind(
        self, bindings: Sequence[tuple[bytes, bytes]] = (), *, writable: Sequence[bytes] = (), last: bytes = b""
    ) -> None:
        """Binds each source to its target, read-only, then makes the paths in `writable` writable. Only before the
        first command. `last` is the mount from which they were bound: the agent unmounts it and gives up its right to
        mount."""
        requests = [FileRequest(FrameType.BIND, source, target) for source, target in bindings]
        requests += [FileRequest(FrameType.BIND, path, flags=_WRITABLE_BIND) for path in writable]
        requests += [FileRequest(FrameType.BIND, last, flags=_LAST_BIND)] if last else []
        channels: list[Channel] = []
        try:
            async with deadline(self._mux.timing.reply, "binding"):
                await self._mux.connected()
                if self._mux.generation < BINDING_GENERATION:
                    raise AgentError(Code.UNSUPPORTED, subject="binding: this agent is older than that")
                for request in requests:  # all of them are on the way before the first is answered
                    channels.append(self._make(request, f"bind {request.path!r} to {request.second!r}"))
                    await self._mux.begin(channels[-1])
                for channel in channels:
                    if await channel.wait_result():
                        with self._mux.close_on_violation():
                            raise ProtocolViolation(f"RESULT of {channel.subject} has the wrong size")
        finally:
            for channel in channels:
                self._mux.drop(channel)

    # Streams without an end of their own

    async def watch(self, path: bytes, *, identity: Identity = AGENT) -> AgentWatcher:
        watcher = AgentWatcher(self._mux, FileRequest(FrameType.WATCH, path, identity=identity))
        await watcher.open()
        return watcher

    async def connect(
        self, *, port: int | None = None, path: bytes | None = None, identity: Identity = AGENT
    ) -> AgentConnection:
        if (port is None) == (path is None):
            raise ValueError("connect takes either a port or a path")
        if port is not None and not 1 <= port <= 0xFFFF:
            raise ValueError(f"port is {port}, must be 1 to 65535")
        request = FileRequest(
            FrameType.CONNECT, path or b"", flags=int(path is not None), offset=port or 0, identity=identity
        )
        subject = f"connect to {shown(path)}" if path is not None else f"connect to port {port}"
        channel = self._make(request, subject)
        try:
            await self._open(channel)
        except BaseException:
            self._mux.drop(channel)
            raise
        return AgentConnection(self._mux, channel)
