"""Files over gRPC: in one message, or in pieces for files of any size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from k8e.core.access.turns import Turns
from k8e.core.contract import FileService
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import LONG, Call, Handler
from k8e.doors.grpc.errors import malformed
from k8e.doors.requests import read_mode
from k8e.link.model import Entry

UPLOAD_PATIENCE: Final = 120.0  # between two pieces of a file
_THREADED: Final = 1000  # entries of an answer that a thread serializes better than the loop


class FileHandlers:
    def __init__(self, files: FileService) -> None:
        self._files = files
        self._large_answers = Turns(16, each=4)

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            "WriteFile": Handler(self._write, 300.0),
            "ReadFile": Handler(self._read, 300.0),
            "UploadFile": Handler(self._upload, LONG),
            "DownloadFile": Handler(self._download, LONG),
            "ListFiles": Handler(self._list, 120.0),
            "GetTree": Handler(self._get_tree, 120.0),
            "MakeDirectory": Handler(self._make_directory),
            "RemoveFile": Handler(self._remove, 300.0),
        }

    async def _write(self, call: Call) -> None:
        request = await call.read_one(pb.WriteFileRequest)
        path, append = requests.read_path(request), read_mode(request.mode or "w")
        size = await self._files.write(call.caller, request.session_id, path, request.content, append=append)
        await call.write(pb.WriteFileResponse(path=request.path, bytes=size))

    async def _read(self, call: Call) -> None:
        request = await call.read_one(pb.ReadFileRequest)
        path = requests.read_path(request)
        async with self._large_answers.take(call.payer):
            content = await self._files.read(
                call.caller, request.session_id, path, offset=request.offset, length=request.length or None
            )
            await call.write(pb.ReadFileResponse(content=content, path=request.path))

    async def _upload(self, call: Call) -> None:
        first = await call.read_one(pb.UploadFileRequest)
        if first.WhichOneof("part") != "header":
            raise malformed("the first message has no header")
        header = first.header
        path, append = requests.read_path(header), read_mode(header.mode or "w")
        permissions = header.permissions if header.HasField("permissions") else None
        size = await self._files.upload(
            call.caller, header.session_id, path, _take_parts(call), append=append, permissions=permissions
        )
        await call.write(pb.UploadFileResponse(path=header.path, bytes=size))

    async def _download(self, call: Call) -> None:
        request = await call.read_one(pb.DownloadFileRequest)
        path = requests.read_path(request)
        pieces = await self._files.download(
            call.caller, request.session_id, path, offset=request.offset, length=request.length or None
        )
        async for piece in pieces:
            await call.write(pb.DownloadFileResponse(content=piece))

    async def _list(self, call: Call) -> None:
        request = await call.read_one(pb.ListFilesRequest)
        path = requests.read_path(request)
        async with self._large_answers.take(call.payer):
            entries = await self._files.list(call.caller, request.session_id, path, since=request.since)
            if len(entries) < _THREADED:
                await call.write(_show_entries(entries))
            else:
                await call.write(await asyncio.to_thread(_show_entries, entries))

    async def _get_tree(self, call: Call) -> None:
        request = await call.read_one(pb.GetTreeRequest)
        path = requests.read_path(request)
        async with self._large_answers.take(call.payer):
            found, below = await self._files.tree(call.caller, request.session_id, path, below=not request.top_only)
            await call.write(await asyncio.to_thread(_show_tree, found, below))

    async def _make_directory(self, call: Call) -> None:
        request = await call.read_one(pb.MakeDirectoryRequest)
        await self._files.make_folder(call.caller, request.session_id, requests.read_path(request))
        await call.write(pb.MakeDirectoryResponse(path=request.path))

    async def _remove(self, call: Call) -> None:
        request = await call.read_one(pb.RemoveFileRequest)
        path = requests.read_path(request)
        await self._files.remove(call.caller, request.session_id, path, recursive=request.recursive)
        await call.write(pb.RemoveFileResponse(path=request.path))


def _show_entries(entries: Sequence[Entry]) -> pb.ListFilesResponse:
    return pb.ListFilesResponse(files=map(answers.show_file, entries))


def _show_tree(found: Entry, below: Sequence[Entry]) -> pb.GetTreeResponse:
    return pb.GetTreeResponse(top=answers.show_file(found), entries=map(answers.show_file, below))


async def _take_parts(call: Call) -> AsyncIterator[bytes]:
    while (message := await call.read(pb.UploadFileRequest, UPLOAD_PATIENCE)) is not None:
        if message.WhichOneof("part") != "content":
            raise malformed("a later message has no content")
        if message.content:
            yield message.content
    await call.check_client()  # of an upload that was broken off no part becomes a file
