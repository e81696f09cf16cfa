"""Files over HTTP: single files in one message, lists of them, and whole trees with files of any size."""

from __future__ import annotations

from k8e.core.contract import FileService
from k8e.core.model import MAX_MESSAGE
from k8e.doors.errors import invalid
from k8e.doors.http.answers import Json, show_entry, show_file
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.routes import BYTES, SESSIONS, Route
from k8e.doors.requests import read_flag, read_mode
from k8e.link.model import Entry

LONGEST_NUMBER = 19  # digits
UPLOAD_PATIENCE = 3600.0  # between two pieces of a file: it may come from a slow program


class FileHandlers:
    def __init__(self, files: FileService) -> None:
        self._files = files

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", (*SESSIONS, "*", "files"), self.read),
            Route("PUT", (*SESSIONS, "*", "files"), self.write, (BYTES,)),
            Route("DELETE", (*SESSIONS, "*", "files"), self.remove),
            Route("GET", (*SESSIONS, "*", "entries"), self.list),
            Route("GET", (*SESSIONS, "*", "tree"), self.get_tree),
            Route("PUT", (*SESSIONS, "*", "folder"), self.make_folder, (BYTES,)),
            Route("GET", (*SESSIONS, "*", "content"), self.download),
            Route("PUT", (*SESSIONS, "*", "content"), self.upload, (BYTES,)),
        )

    # In one message

    async def read(self, exchange: Exchange, request: Request) -> None:
        path, *part = request.read_query(path="", offset="", length="")
        offset, length = read_part(*part)
        content = await self._files.read(exchange.caller, request.path[2], path, offset=offset, length=length)
        if request.headers.get(b"accept") == BYTES.encode():
            await exchange.send_bytes(200, content, BYTES)
        else:
            await exchange.send_json(200, show_file(path, content))

    async def write(self, exchange: Exchange, request: Request) -> None:
        path, mode = request.read_query(path="", mode="w")
        append = read_mode(mode)
        content = await exchange.read_body(request, MAX_MESSAGE)
        size = await self._files.write(exchange.caller, request.path[2], path, content, append=append)
        await exchange.send_json(200, {"ok": True, "path": path, "bytes": size})

    async def remove(self, exchange: Exchange, request: Request) -> None:
        path, recursive = request.read_query(path="", recursive="0")
        deep = read_flag("recursive", recursive)
        await self._files.remove(exchange.caller, request.path[2], path, recursive=deep)
        await exchange.send_json(200, {"ok": True, "path": path})

    async def list(self, exchange: Exchange, request: Request) -> None:
        path, text = request.read_query(path="", since="0")
        try:
            since = float(text)
        except ValueError:
            raise invalid("since", f"{text!r} is no point in time", hint="unix seconds") from None
        entries = await self._files.list(exchange.caller, request.path[2], path, since=since)
        await exchange.send_json(200, {"files": [show_entry(entry) for entry in entries]})

    # Trees, and files of any size

    async def get_tree(self, exchange: Exchange, request: Request) -> None:
        path, below = request.read_query(path="", below="1")
        deep = read_flag("below", below)
        found, nodes = await self._files.tree(exchange.caller, request.path[2], path, below=deep)
        entries = [show_node(entry) for entry in nodes]
        await exchange.send_json(200, {**show_node(found), "path": path, "entries": entries})

    async def make_folder(self, exchange: Exchange, request: Request) -> None:
        (path,) = request.read_query(path="")
        await exchange.read_body(request, limit=0)
        await self._files.make_folder(exchange.caller, request.path[2], path)
        await exchange.send_json(200, {"ok": True, "path": path})

    async def download(self, exchange: Exchange, request: Request) -> None:
        """An error before the first byte has a status. A later one cuts the answer off, which then has no end."""
        path, *part = request.read_query(path="", offset="", length="")
        offset, length = read_part(*part)
        pieces = await self._files.download(exchange.caller, request.path[2], path, offset=offset, length=length)
        first = await anext(pieces, b"")
        await exchange.start_pieces(BYTES)
        if first:
            await exchange.send_piece(first)
        async for piece in pieces:
            await exchange.send_piece(piece)
        await exchange.end_frames()

    async def upload(self, exchange: Exchange, request: Request) -> None:
        path, mode, text = request.read_query(path="", mode="w", permissions="")
        append = read_mode(mode)
        try:
            permissions = int(text, 8) if text else None
        except ValueError:
            raise invalid("permissions", f"{text!r} are no permissions", hint="octal, such as 644") from None
        pieces = exchange.read_pieces(UPLOAD_PATIENCE)
        size = await self._files.upload(
            exchange.caller, request.path[2], path, pieces, append=append, permissions=permissions
        )
        await exchange.send_json(200, {"ok": True, "path": path, "bytes": size})


def read_part(offset: str, length: str) -> tuple[int, int | None]:
    """Where to begin, and how much to read at most; None: to the end."""
    for field, text in (("offset", offset), ("length", length)):
        if text and not (text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER):
            raise invalid(field, f"{text[:64]!r} is no number of bytes", hint="a whole number, such as 4096")
    return int(offset or 0), int(length) if length else None


def show_node(entry: Entry) -> Json:
    """An entry of a tree. Bytes of its name that are not UTF-8 are lone surrogates, as in requests."""
    return {
        "path": entry.name.decode("utf-8", "surrogateescape"),
        "type": entry.type.name.lower(),
        "size": entry.size,
        "permissions": entry.mode & 0o7777,
        "unreadable": entry.unreadable,
    }
