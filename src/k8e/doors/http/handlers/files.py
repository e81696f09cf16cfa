"""Single files over HTTP, each in one message, and lists of them (trees.py has what may be of any size)."""

from __future__ import annotations

from k8e.core.contract import FileService
from k8e.core.model import MAX_MESSAGE
from k8e.doors.http import answers
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields, invalid
from k8e.doors.http.route import BYTES, SESSIONS, Route


class Files:
    def __init__(self, files: FileService) -> None:
        self._files = files

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", (*SESSIONS, "*", "files"), self.read),
            Route("PUT", (*SESSIONS, "*", "files"), self.write, (BYTES,)),
            Route("GET", (*SESSIONS, "*", "entries"), self.list),
        )

    async def read(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        path = query.take_text("path")
        query.finish()
        content = await self._files.read(exchange.caller, request.path[2], path)
        if request.headers.get(b"accept") == BYTES.encode():
            await exchange.send_bytes(200, content, BYTES)
        else:
            await exchange.send_json(200, answers.show_file(path, content))

    async def write(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        path, mode = query.take_text("path"), query.take_text("mode", "w")
        query.finish()
        if mode not in ("w", "a"):
            raise invalid("mode", f"{mode!r} is no way to write", hint="w replaces, a appends")
        content = await exchange.read_body(request, MAX_MESSAGE)
        size = await self._files.write(exchange.caller, request.path[2], path, content, append=mode == "a")
        await exchange.send_json(200, {"ok": True, "path": path, "bytes": size})

    async def list(self, exchange: Exchange, request: Request) -> None:
        query = Fields(request.query)
        path, text = query.take_text("path"), query.take_text("since", "0")
        query.finish()
        try:
            since = float(text)
        except ValueError:
            raise invalid("since", f"{text!r} is no point in time", hint="unix seconds") from None
        entries = await self._files.list(exchange.caller, request.path[2], path, since=since)
        await exchange.send_json(200, {"files": [answers.show_entry(entry) for entry in entries]})
