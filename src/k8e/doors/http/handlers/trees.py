"""Whole trees of files, in and out: what there is, and the bytes of each, of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator

from k8e.core.contract import FileService
from k8e.doors.http.answers import TYPES, Json
from k8e.doors.http.exchange import BODY_PATIENCE, Exchange, Request
from k8e.doors.http.fields import Fields, invalid
from k8e.doors.http.route import BYTES, SESSIONS, Route
from k8e.link.model import Entry


class Trees:
    def __init__(self, files: FileService) -> None:
        self._files = files

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", (*SESSIONS, "*", "tree"), self.look),
            Route("PUT", (*SESSIONS, "*", "folder"), self.make_folder, (BYTES,)),
            Route("GET", (*SESSIONS, "*", "content"), self.read),
            Route("PUT", (*SESSIONS, "*", "content"), self.write, (BYTES,)),
        )

    async def look(self, exchange: Exchange, request: Request) -> None:
        path = read_path(request)
        found, below = await self._files.tree(exchange.caller, request.path[2], path)
        await exchange.send_json(200, {**shape(found), "path": path, "entries": [shape(entry) for entry in below]})

    async def make_folder(self, exchange: Exchange, request: Request) -> None:
        path = read_path(request)
        await exchange.read_body(request, limit=0)
        await self._files.make_folder(exchange.caller, request.path[2], path)
        await exchange.send_json(200, {"ok": True, "path": path})

    async def read(self, exchange: Exchange, request: Request) -> None:
        """An error before the first byte is told; one after it breaks the answer off, which no end follows then."""
        pieces = await self._files.download(exchange.caller, request.path[2], read_path(request))
        first = await anext(pieces, b"")
        await exchange.start_pieces(BYTES)
        if first:
            await exchange.send_piece(first)
        async for piece in pieces:
            await exchange.send_piece(piece)
        await exchange.end_frames()

    async def write(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        path, text = query.take_text("path"), query.take_text("permissions")
        query.finish()
        try:
            permissions = int(text, 8) if text else None
        except ValueError:
            raise invalid("permissions", f"{text!r} are no permissions", hint="octal, such as 644") from None

        size = await self._files.upload(
            exchange.caller, request.path[2], path, _take_body(exchange), append=False, permissions=permissions
        )
        await exchange.send_json(200, {"ok": True, "path": path, "bytes": size})


async def _take_body(exchange: Exchange) -> AsyncIterator[bytes]:
    while (piece := await exchange.read_piece(BODY_PATIENCE)) is not None:
        yield piece


def read_path(request: Request) -> str:
    query = Fields(request.query)
    path = query.take_text("path")
    query.finish()
    return path


def shape(entry: Entry) -> Json:
    """A name that is not UTF-8 has lone surrogates, as in requests."""
    return {
        "path": entry.name.decode("utf-8", "surrogateescape"),
        "type": TYPES[entry.type],
        "size": entry.size,
        "permissions": entry.mode & 0o7777,
        "unreadable": entry.unreadable,
    }
