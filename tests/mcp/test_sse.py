"""The SSE transport by itself, with a short interval between two pings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from k8e.core.model import Caller
from k8e.doors.http.exchange import Exchange
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.protocol import ProtocolServer
from k8e.doors.mcp.transport.sse import PING, SseTransport
from tests.core.rig import open_rig


class RecordedExchange(Exchange):
    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        await self.sent.put(b"%d %b" % (status, dict(headers)[b"Content-Type"]))

    async def send_piece(self, data: bytes) -> None:
        await self.sent.put(data)


async def test_a_stream_begins_with_its_token_and_pings_every_fifteen_seconds(tmp_path: Path) -> None:
    assert PING == 15.0
    exchange, gone = RecordedExchange(), asyncio.Event()
    async with open_rig(tmp_path) as rig:
        client = McpClient(rig.service, Caller(0), known=False)
        stream = SseTransport("", "mcp-token", ProtocolServer(client), "/mcp", ping=0.01)
        serving = asyncio.create_task(stream.serve(exchange, gone))
        sent = [await exchange.sent.get() for _ in range(5)]
        gone.set()
        await serving
    assert sent[0] == b"200 text/event-stream"
    assert sent[1] == b"event: session\ndata: mcp-token\n\n"
    assert sent[2] == b"event: endpoint\ndata: /mcp?session_id=mcp-token\n\n"
    assert sent[3:] == [b": ping\n\n", b": ping\n\n"]
