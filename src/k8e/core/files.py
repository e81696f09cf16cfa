"""Files of a session. Every operation happens inside the sandbox, as the default user, by the agent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace

from k8e.core import checks
from k8e.core.log.audit import call
from k8e.core.model import MAX_MESSAGE, WORKSPACE, Caller
from k8e.core.parts import Parts
from k8e.core.sessions.sessions import Opened, Sessions
from k8e.link.errors import AgentError, Code
from k8e.link.model import Entry, FileType


class Files:
    """Implements `contract.FileService`."""

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions

    @call("write_file")
    async def write(self, caller: Caller, session_id: str, path: str, content: bytes, *, append: bool) -> int:
        target = checks.check_path("path", path)
        checks.check_content("content", content)
        opened = await self._sessions.open(caller, session_id)
        identity = opened.place.file_owner
        with self._sessions.using(opened.live, f"writing {path}"):
            try:
                await opened.sandbox.write_file(target, content, append=append, identity=identity)
            except AgentError as error:
                if error.code is not Code.NOT_FOUND:
                    raise
                # Nothing was written: its directory is missing.
                await opened.sandbox.mkdir(target.rstrip(b"/").rpartition(b"/")[0] or b"/", identity=identity)
                await opened.sandbox.write_file(target, content, append=append, identity=identity)
        return len(content)

    @call("upload")
    async def upload(
        self,
        caller: Caller,
        session_id: str,
        path: str,
        pieces: AsyncIterable[bytes],
        *,
        append: bool,
        permissions: int | None = None,
    ) -> int:
        """Of any size. A new file is there when the last piece has come; one that is there is written as they come."""
        target = checks.check_path("path", path)
        checks.check_number("permissions", permissions or 0, 0, 0o777)
        opened = await self._sessions.open(caller, session_id)
        identity = opened.place.file_owner
        counted = _Counted(pieces)
        with self._sessions.using(opened.live, f"writing {path}"):
            # Before the first piece is taken: it could not be sent a second time.
            await opened.sandbox.mkdir(target.rstrip(b"/").rpartition(b"/")[0] or b"/", identity=identity)
            await opened.sandbox.write_file(target, counted, append=append, mode=permissions, identity=identity)
        return counted.size

    @call("download")
    async def download(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """Of any size, or a part."""
        source = checks.check_path("path", path)
        _check_part(offset, length)
        opened = await self._sessions.open(caller, session_id)
        return self._stream(opened, source, path, offset, length)

    async def _stream(
        self, opened: Opened, source: bytes, path: str, offset: int, length: int | None
    ) -> AsyncGenerator[bytes, None]:
        identity = opened.place.file_owner
        with self._sessions.using(opened.live, f"reading {path}"):
            stream = opened.sandbox.read_stream(source, offset=offset, length=length, identity=identity)
            async for piece in stream:
                yield piece

    @call("read_file")
    async def read(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> bytes:
        source = checks.check_path("path", path)
        _check_part(offset, length)
        opened = await self._sessions.open(caller, session_id)
        identity = opened.place.file_owner
        with self._sessions.using(opened.live, f"reading {path}"):
            return await opened.sandbox.read_file(
                source, offset=offset, length=length, limit=MAX_MESSAGE, identity=identity
            )

    @call("tree")
    async def tree(
        self, caller: Caller, session_id: str, path: str, *, below: bool = True
    ) -> tuple[Entry, Sequence[Entry]]:
        """The entry at the path, and with `below` everything below it by relative names."""
        top = checks.check_path("path", path)
        opened = await self._sessions.open(caller, session_id)
        identity = opened.place.file_owner
        with self._sessions.using(opened.live, f"looking at {path}"):
            found = await opened.sandbox.stat(top, identity=identity)
            if found.type is not FileType.DIRECTORY or not below:
                return found, ()
            return found, await opened.sandbox.list_dir(top, recursive=True, identity=identity)

    @call("make_folder")
    async def make_folder(self, caller: Caller, session_id: str, path: str) -> None:
        """With those above it; fine when it is there."""
        target = checks.check_path("path", path)
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, f"making {path}"):
            await opened.sandbox.mkdir(target, identity=opened.place.file_owner)

    @call("remove_file")
    async def remove(self, caller: Caller, session_id: str, path: str, *, recursive: bool = False) -> None:
        """A file or an empty directory; with `recursive`, also a directory with everything in it."""
        target = checks.check_path("path", path)
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, f"removing {path}"):
            await opened.sandbox.remove(target, recursive=recursive, identity=opened.place.file_owner)

    @call("list_files")
    async def list(self, caller: Caller, session_id: str, path: str = "", *, since: float = 0) -> Sequence[Entry]:
        top = checks.check_path("path", path) if path else WORKSPACE
        checks.check_number("since", since, 0, 1 << 40)
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, f"listing {path or 'the workspace'}"):
            entries = await opened.sandbox.list_dir(top, recursive=True, identity=opened.place.file_owner)
        prefix = top.rstrip(b"/") + b"/"
        return [replace(entry, name=prefix + entry.name) for entry in entries if entry.mtime_ns >= since * 1e9]


def _check_part(offset: int, length: int | None) -> None:
    checks.check_number("offset", offset, 0, 1 << 62)
    checks.check_number("length", length or 0, 0, 1 << 62)


class _Counted:
    """Passes pieces on and counts their bytes."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self.size = 0
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            self.size += len(piece)
            yield piece
