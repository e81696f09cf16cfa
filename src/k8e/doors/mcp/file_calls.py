"""The tools that write, read and list files of a session."""

from __future__ import annotations

import base64
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.answers import Answer, Image, Talk
from k8e.doors.mcp.arguments import decode_base64, take_encoding, take_session
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.images import recognise

MAX_FILE: Final = 8 << 20  # JSON carries it twice, base64 adds a third


async def write_file(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = take_session(fields)
    path = fields.take_text("path")
    mode = fields.take_text("mode", "w")
    if mode not in ("w", "a"):
        raise invalid("mode", f"{mode!r} is no way to write", hint="w replaces, a appends")
    encoding, content = take_encoding(fields), fields.take_text("content")
    fields.finish()
    data = content.encode("utf-8", "surrogateescape") if encoding == "utf-8" else decode_base64(content)
    written = [""]

    async def write(session_id: str) -> int:
        written[0] = session_id
        return await guest.service.files.write(guest.caller, session_id, path, data, append=mode == "a")

    size = await guest.use(named, write)
    return Answer({"ok": True, "path": path, "bytes": size, "session_id": written[0]})


async def read_file(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    """An image is shown beside the answer, and not once more in it."""
    path, session_id, content = await _read(guest, fields)
    facts: Json = {"bytes": len(content), "session_id": session_id}
    if kind := recognise(content):
        body = {"path": path, "encoding": "base64", "mime_type": kind, **facts}
        return Answer(body, image=Image(content, kind))
    return Answer({**answers.show_file(path, content), **facts})


async def read_data(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    encoding = take_encoding(fields)
    path, session_id, content = await _read(guest, fields)
    body = answers.show_file(path, content)
    if encoding == "base64":
        body |= {"content": base64.b64encode(content).decode("ascii"), "encoding": encoding}
    return Answer({**body, "bytes": len(content), "session_id": session_id})


async def _read(guest: Guest, fields: Fields) -> tuple[str, str, bytes]:
    named = take_session(fields)
    path = fields.take_text("path")
    fields.finish()

    async def read(session_id: str) -> tuple[str, bytes]:
        content = bytearray()
        pieces = await guest.service.files.download(guest.caller, session_id, path, length=MAX_FILE + 1)
        async for piece in pieces:
            content += piece
        return session_id, bytes(content)

    session_id, content = await guest.use(named, read)
    if len(content) > MAX_FILE:
        hint = "Read a part of it with sandbox_run: head -c, tail -c, sed -n."
        error = f"the file has more than {MAX_FILE} bytes, too many for one answer"
        raise Fault(Kind.INVALID, "file_too_large", error, hint=hint, field="path")
    return path, session_id, content


async def list_files(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = take_session(fields)
    path, since = fields.take_text("path"), fields.take_number("since", 0)
    fields.finish()

    async def listing(session_id: str) -> Json:
        entries = await guest.service.files.list(guest.caller, session_id, path, since=since)
        return {"files": [answers.show_entry(entry) for entry in entries], "session_id": session_id}

    return Answer(await guest.use(named, listing))
