"""The tools that write, read and list files of a session."""

from __future__ import annotations

import base64
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.requests import decode_base64, take_encoding, take_session
from k8e.doors.mcp.tools.tool import CallContext, ImageContent, ToolAnswer
from k8e.doors.requests import read_mode

MAX_FILE: Final = 8 << 20  # JSON carries it twice, base64 adds a third
_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


async def write_file(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = take_session(fields)
    path = fields.take_text("path")
    append = read_mode(fields.take_text("mode", "w"))
    encoding, content = take_encoding(fields), fields.take_text("content")
    fields.finish()
    data = content.encode("utf-8", "surrogateescape") if encoding == "utf-8" else decode_base64(content)
    written = [""]

    async def write(session_id: str) -> int:
        written[0] = session_id
        return await client.service.files.write(client.caller, session_id, path, data, append=append)

    size = await client.use(named, write)
    return ToolAnswer({"ok": True, "path": path, "bytes": size, "session_id": written[0]})


async def read_file(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    """Sends an image as image content, and not once more in the JSON."""
    path, session_id, content = await _read(client, fields)
    facts: Json = {"bytes": len(content), "session_id": session_id}
    if mime_type := detect_image(content):
        body = {"path": path, "encoding": "base64", "mime_type": mime_type, **facts}
        return ToolAnswer(body, images=(ImageContent(content, mime_type),))
    return ToolAnswer({**answers.show_file(path, content), **facts})


async def read_data(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    encoding = take_encoding(fields)
    path, session_id, content = await _read(client, fields)
    body = answers.show_file(path, content)
    if encoding == "base64":
        body |= {"content": base64.b64encode(content).decode("ascii"), "encoding": encoding}
    return ToolAnswer({**body, "bytes": len(content), "session_id": session_id})


async def _read(client: McpClient, fields: Fields) -> tuple[str, str, bytes]:
    named = take_session(fields)
    path = fields.take_text("path")
    offset, length = fields.take_count("offset", 0), fields.take_count("length", 0)
    fields.finish()
    if length < 0:
        raise invalid("length", "length is less than 0", hint="0 is to the end")
    most = min(length, MAX_FILE + 1) if length > 0 else MAX_FILE + 1

    async def read(session_id: str) -> tuple[str, bytes]:
        content = bytearray()
        pieces = await client.service.files.download(client.caller, session_id, path, offset=offset, length=most)
        async for piece in pieces:
            content += piece
        return session_id, bytes(content)

    session_id, content = await client.use(named, read)
    if len(content) > MAX_FILE:
        hint = "Read it in parts, with offset and length."
        error = f"the file has more than {MAX_FILE} bytes, too many for one answer"
        raise Fault(Kind.INVALID, "file_too_large", error, hint=hint, field="path")
    return path, session_id, content


async def list_files(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = take_session(fields)
    path, since = fields.take_text("path"), fields.take_number("since", 0)
    fields.finish()

    async def listing(session_id: str) -> Json:
        entries = await client.service.files.list(client.caller, session_id, path, since=since)
        return {"files": [answers.show_entry(entry) for entry in entries], "session_id": session_id}

    return ToolAnswer(await client.use(named, listing))


def detect_image(content: bytes) -> str:
    """The media type, by the first bytes: the sandbox chooses the name. Empty: no image that clients show."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _SIGNATURES if content.startswith(signature)), "")
