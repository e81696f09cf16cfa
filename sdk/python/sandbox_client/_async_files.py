"""The calls about files, written once: _sync_files.py is generated from this file (scripts/unasync.py)."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import AsyncIterator, Iterable
from typing import IO, Any

from sandbox_client import _requests as requests
from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import NotText
from sandbox_client._local_files import (
    LocalPath,
    TargetFolder,
    find_permissions,
    list_folder,
    open_source,
    replace_file,
)
from sandbox_client._model import FileInfo, Transfer


class AsyncFileCalls:
    """The part of a client that is about files. Every call ends after `timeout` seconds, with DeadlineExceeded."""

    async def write_file(
        self,
        session_id: str,
        path: requests.Path,
        content: str | bytes,
        mode: str = "w",
        *,
        timeout: float = requests.FILE_SECONDS,
    ) -> int:
        """Writes ("w") or appends ("a") text or bytes of any size, and says how many bytes. Directories are made."""
        requests.check_left(timeout)
        data = content.encode() if isinstance(content, str) else content
        if len(data) > requests.SMALL:
            return await self._send(session_id, path, io.BytesIO(data), timeout, mode)
        request = pb.WriteFileRequest(session_id=session_id, content=data, mode=mode)
        requests.set_path(request, path)
        return int((await self._call("WriteFile", request, pb.WriteFileResponse, timeout)).bytes)

    async def read_bytes(
        self,
        session_id: str,
        path: requests.Path,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float = requests.FILE_SECONDS,
    ) -> bytes:
        """Reads a file of any size, or `length` bytes of it from `offset` on; fewer where it ends before."""
        content = io.BytesIO()  # which gives its bytes away without a copy
        await self._receive(session_id, path, content, timeout, offset, length)
        return content.getvalue()

    async def read_file(self, session_id: str, path: requests.Path, *, timeout: float = requests.FILE_SECONDS) -> str:
        """Reads a file that is text in UTF-8."""
        content = await self.read_bytes(session_id, path, timeout=timeout)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of {len(content)}"
            raise NotText(f"{path!r} is not UTF-8", code="not_text", detail=detail, hint="use read_bytes") from error

    async def list_files(
        self,
        session_id: str,
        since: float = 0,
        *,
        path: requests.Path = "",
        timeout: float = requests.FILE_SECONDS,
    ) -> list[FileInfo]:
        """Lists everything below a directory (the workspace) that was modified since then."""
        requests.check_since(since)
        requests.check_left(timeout)
        request = pb.ListFilesRequest(session_id=session_id, since=since)
        requests.set_path(request, path)
        response = await self._call("ListFiles", request, pb.ListFilesResponse, timeout)
        return [FileInfo.read(info) for info in response.files]

    async def upload(
        self,
        session_id: str,
        source: LocalPath | IO[bytes],
        path: requests.Path,
        *,
        timeout: float = requests.FILE_SECONDS,
    ) -> Transfer:
        """Copies a file or folder of this machine, or the rest of an open binary file, to `path` in the sandbox. No
        more than a few MiB are in memory. Links and special files of a folder are not copied: `skipped` names them."""
        requests.check_left(timeout)
        if not isinstance(source, str | os.PathLike):
            return Transfer(await self._send(session_id, path, source, timeout), 1)
        due = time.monotonic() + timeout
        if not await asyncio.to_thread(os.path.isdir, source):
            return Transfer(await self._send_path(session_id, source, path, due), 1)
        found = await asyncio.to_thread(list_folder, source)
        top = (path.encode() if isinstance(path, str) else path).rstrip(b"/")
        size = 0
        for entry in found.files:
            size += await self._send_path(session_id, entry.path, top + b"/" + entry.name, due)
        for name in found.bare if found.files or found.bare else (b"",):
            request = pb.MakeDirectoryRequest(session_id=session_id, path_bytes=top + b"/" + name)
            await self._call("MakeDirectory", request, pb.MakeDirectoryResponse, _find_rest(due))
        return Transfer(size, len(found.files), found.skipped)

    async def download(
        self,
        session_id: str,
        path: requests.Path,
        target: LocalPath | IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float = requests.FILE_SECONDS,
    ) -> Transfer:
        """Copies a file of the sandbox, or a part of it, to a path or an open binary file of this machine; or a folder
        with everything below it to a path. No more than a few MiB are in memory. A file has its name when it is
        complete. Links and special files of a folder are not copied: `skipped` names them, and folders
        that cannot be read."""
        requests.check_left(timeout)
        if not isinstance(target, str | os.PathLike):
            return Transfer(await self._receive(session_id, path, target, timeout, offset, length), 1)
        due = time.monotonic() + timeout
        request = pb.GetTreeRequest(session_id=session_id)
        requests.set_path(request, path)
        tree = await self._call("GetTree", request, pb.GetTreeResponse, timeout)
        if tree.top.type == "directory" and not offset and length is None:
            return await self._download_folder(session_id, path, tree.entries, target, due)
        with replace_file(target, executable=bool(tree.top.permissions & 0o100)) as file:
            return Transfer(await self._receive(session_id, path, file, _find_rest(due), offset, length), 1)

    async def _download_folder(
        self, session_id: str, path: requests.Path, entries: Iterable[pb.FileInfo], target: LocalPath, due: float
    ) -> Transfer:
        folder = await asyncio.to_thread(TargetFolder, target)
        top = (path.encode() if isinstance(path, str) else path).rstrip(b"/") + b"/"
        size, files, skipped = 0, 0, []
        for entry in entries:
            name = entry.path_bytes or entry.path.encode()
            if entry.type == "directory":
                await asyncio.to_thread(folder.make, name)
            if entry.unreadable or entry.type not in ("directory", "file"):
                skipped.append(entry.path)
            elif entry.type == "file":
                with folder.replace(name, executable=bool(entry.permissions & 0o100)) as file:
                    size += await self._receive(session_id, top + name, file, _find_rest(due))
                files += 1
        return Transfer(size, files, tuple(skipped))

    # A piece at a time

    async def _send_path(self, session_id: str, source: LocalPath, path: requests.Path, due: float) -> int:
        with await asyncio.to_thread(open_source, source) as file:
            rest = _find_rest(due)
            return await self._send(session_id, path, file, rest, permissions=find_permissions(file))

    async def _send(
        self,
        session_id: str,
        path: requests.Path,
        source: IO[bytes],
        timeout: float,
        mode: str = "w",
        permissions: int | None = None,
    ) -> int:
        requests.check_left(timeout)
        header = pb.UploadHeader(session_id=session_id, mode=mode, permissions=permissions)
        requests.set_path(header, path)
        pieces = AsyncPieces(header, source)
        return int((await self._upload("UploadFile", pieces, pb.UploadFileResponse, timeout)).bytes)

    async def _receive(
        self,
        session_id: str,
        path: requests.Path,
        target: IO[bytes],
        timeout: float,
        offset: int = 0,
        length: int | None = None,
    ) -> int:
        requests.check_left(timeout)
        # On the wire no length is the whole file: of nothing at all, one byte is asked for and dropped.
        request = pb.DownloadFileRequest(session_id=session_id, offset=offset, length=1 if length == 0 else length)
        requests.set_path(request, path)
        size = 0
        async for piece in self._stream("DownloadFile", request, pb.DownloadFileResponse, timeout):
            if length != 0:
                await asyncio.to_thread(target.write, piece.content)
                size += len(piece.content)
        return size

    # The way there, which the client has

    async def _call(self, name: str, request: Any, response: Any, timeout: float = requests.MARGIN) -> Any:
        raise NotImplementedError

    async def _upload(self, name: str, pieces: AsyncPieces, response: Any, timeout: float) -> Any:
        raise NotImplementedError

    def _stream(self, name: str, request: Any, response: Any, timeout: float) -> AsyncIterator[Any]:
        raise NotImplementedError


def _find_rest(due: float) -> float:
    """The seconds that are left."""
    return requests.check_left(max(0.0, due - time.monotonic()))


class AsyncPieces:
    """The messages of an upload. A source that cannot be read any further ends the call, so that the sandbox does not
    take a part of the content for the whole: `cancel` is set by the caller, and `error` has the reason."""

    def __init__(self, header: pb.UploadHeader, source: IO[bytes]) -> None:
        self._header = header
        self._source = source
        self.cancel: Any = None
        self.error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[pb.UploadFileRequest]:
        yield pb.UploadFileRequest(header=self._header)
        while True:
            try:
                data = await asyncio.to_thread(self._source.read, requests.PIECE)
                if not isinstance(data, bytes):
                    raise TypeError(f"read() gave {type(data).__name__}, not bytes: open the file in binary mode")
            except Exception as error:
                self.error = error
                if self.cancel is None:
                    raise
                self.cancel()
                return
            if not data:
                return
            yield pb.UploadFileRequest(content=data)
