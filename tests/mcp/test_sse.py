"""The older stream by itself, with a clock that has no patience: what it says when nobody else says anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.types import Message

from k8e.core.model import Caller
from k8e.doors.mcp.desk import Desk
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.sse import PING, EventStream
from tests.core.rig import open_rig


async def test_a_stream_begins_with_its_token_and_shows_every_fifteen_seconds_that_it_is_there(tmp_path: Path) -> None:
    assert PING == 15.0
    sent: asyncio.Queue[Message] = asyncio.Queue()
    leave = asyncio.Event()

    async def receive() -> Message:
        await leave.wait()
        return {"type": "http.disconnect"}

    async with open_rig(tmp_path) as rig:
        guest = Guest(rig.service, Caller(0), known=False)
        stream = EventStream("mcp-token", Desk(guest), "/mcp", ping=0.01)
        serving = asyncio.create_task(stream.serve(receive, sent.put))
        head = await sent.get()
        assert (head["status"], dict(head["headers"])[b"content-type"]) == (200, b"text/event-stream")
        bodies = [(await sent.get())["body"] for _ in range(4)]
        leave.set()
        await serving
    assert bodies[0] == b"event: session\ndata: mcp-token\n\n"
    assert bodies[1] == b"event: endpoint\ndata: /mcp?session_id=mcp-token\n\n"
    assert bodies[2:] == [b": ping\n\n", b": ping\n\n"]
