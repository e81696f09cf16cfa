"""Directories and files of any size over gRPC, for `k8e sandbox cp`, `rm` and `mkdir`.

What a gateway says about names, kinds and sizes may be anything: commands trust it as little as they trust a sandbox.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import grpc

from k8e.cli.client import Answer, SessionName
from k8e.cli.process import Failure
from k8e.cli.remote import connection, messages
from k8e.cli.remote.calls import RemoteCalls, name_owner, serialize, write
from k8e.cli.remote.messages import decode, readable
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from k8e.doors.http.answers import Json

REMOVAL: Final = 330.0
TRANSFER: Final = 86_400.0  # of one file: the gateway gives up sooner when nothing moves


class RemoteTrees(RemoteCalls):
    def get_tree(self, session: SessionName, path: str, *, below: bool = True) -> Answer:
        where = messages.split_text("path", path)
        request = pb.GetTreeRequest(session_id=readable(session.session_id), **where, top_only=not below)
        answer = self._ask("GetTree", request, session)
        entries = [show_node(entry) for entry in answer.entries]
        return write({**show_node(answer.top), "path": decode(path), "entries": entries})

    def create_directory(self, session: SessionName, path: str) -> Answer:
        where = messages.split_text("path", path)
        self._call("MakeDirectory", pb.MakeDirectoryRequest(session_id=readable(session.session_id), **where), session)
        return write({"ok": True, "path": decode(path)})

    def remove_file(self, session: SessionName, path: str, *, recursive: bool) -> Answer:
        where = messages.split_text("path", path)
        request = pb.RemoveFileRequest(session_id=readable(session.session_id), **where, recursive=recursive)
        self._call("RemoveFile", request, session, seconds=REMOVAL)
        return write({"ok": True, "path": decode(path)})

    def read_pieces(
        self, session: SessionName, path: str, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        where = messages.name_part(path, offset, length)
        request = pb.DownloadFileRequest(session_id=readable(session.session_id), **where)
        method = METHODS["DownloadFile"]
        call: Any = self._channel.unary_stream(method.path, serialize, method.response.FromString)

        def attempt() -> Iterator[bytes]:
            pieces = self._take_pieces(self._begin(call, request, session, TRANSFER))
            first = next(pieces, b"")  # an error comes before it
            return itertools.chain((first,), pieces)

        return self._repeat(attempt)

    def _take_pieces(self, answers: Iterable[pb.DownloadFileResponse]) -> Iterator[bytes]:
        try:
            for answer in answers:
                yield answer.content
        except grpc.RpcError as error:
            raise connection.explain(self.endpoint, error) from error

    def write_pieces(
        self,
        session: SessionName,
        path: str,
        pieces: Iterable[bytes],
        permissions: int | None = None,
        mode: str = "w",
    ) -> Answer:
        where = messages.split_text("path", path)
        header = pb.UploadHeader(session_id=readable(session.session_id), **where, permissions=permissions, mode=mode)
        upload = Upload(header, pieces)  # whose pieces can be sent once only: it is not repeated
        method = METHODS["UploadFile"]
        call: Any = self._channel.stream_unary(method.path, serialize, method.response.FromString)
        try:
            answer = call(upload.messages(), timeout=TRANSFER, metadata=name_owner(session))
        except grpc.RpcError as error:
            if upload.failure is not None:
                raise upload.failure from error
            raise connection.explain(self.endpoint, error, harmless=False) from error
        return write({"ok": True, "path": decode(path), "bytes": answer.bytes})


class Upload:
    """The messages of an upload, made in a thread of gRPC; `failure` is why they ended early."""

    def __init__(self, header: pb.UploadHeader, pieces: Iterable[bytes]) -> None:
        self.failure: Failure | None = None
        self._header = header
        self._pieces = pieces

    def messages(self) -> Iterator[pb.UploadFileRequest]:
        yield pb.UploadFileRequest(header=self._header)
        try:
            for piece in self._pieces:
                yield pb.UploadFileRequest(content=piece)
        except Failure as failure:
            self.failure = failure
            raise  # gRPC ends the call


def show_node(file: pb.FileInfo) -> Json:
    """As the HTTP door shows it."""
    name = file.path_bytes or file.path.encode()
    return {
        "path": name.decode("utf-8", "surrogateescape"),
        "type": file.type,
        "size": file.size,
        "permissions": file.permissions,
        "unreadable": file.unreadable,
    }
