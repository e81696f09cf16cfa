"""Clients that send more than there is memory for: over HTTP, and line by line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from k8e.core.access.access import Payer
from k8e.core.model import Caller
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.protocol import ProtocolServer
from k8e.doors.mcp.transport.stdio import StdioTransport
from k8e.doors.request_memory import RequestMemory
from tests.core.rig import open_rig
from tests.doors.test_request_memory import Noted, take_answers
from tests.mcp.agents import INITIALIZE
from tests.mcp.test_connection_limits import connect, open_address

MIB = 1 << 20
ROOT = Caller(0)
EACH = 32 * MIB


async def test_bodies_that_do_not_end_fill_no_memory(tmp_path: Path) -> None:
    memory = Noted(EACH, patience=0.2)
    async with open_address(tmp_path, ConnectionLimits(100), memory=memory) as port:
        size = 12 * MIB
        head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        head += f"Accept: application/json, text/event-stream\r\nContent-Length: {size}\r\n\r\n"

        async def send() -> bytes:
            reader, writer = await connect(port)
            answer = b""
            try:
                writer.write(head.encode() + b" " * (size - 1))
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # it may not hear why
                    answer = await reader.readuntil(b"}")
            finally:
                writer.transport.abort()
            return answer

        answers = await take_answers([asyncio.create_task(send()) for _ in range(8)], 6)  # two find room, and wait on
        assert 2 * size - 2 <= memory.highest <= EACH
        answers = [answer for answer in answers if answer]
        assert len(answers) >= 4
        assert all(b" 429 " in answer and b"too_many_bytes" in answer for answer in answers)
        while memory.total:  # a client that left holds nothing
            await asyncio.sleep(0.01)


class Agent:
    """Initializes, and begins a line that never ends."""

    def __init__(self, size: int) -> None:
        self._pieces = [json.dumps(INITIALIZE).encode() + b"\n", *[b"x" * MIB] * (size // MIB)]
        self.heard = b""

    async def read_piece(self) -> bytes | None:
        return self._pieces.pop(0) if self._pieces else None

    async def send_piece(self, data: bytes) -> None:
        self.heard += data


async def test_a_line_that_does_not_end_is_refused_and_what_was_asked_before_is_answered(tmp_path: Path) -> None:
    memory = RequestMemory(EACH, patience=0.05)
    async with open_rig(tmp_path) as rig:
        other = memory.allocate(Payer(0, ""))
        await other.add(EACH - 8 * MIB)  # of another agent of the same user
        agent, allocation = Agent(EACH), memory.allocate(Payer(0, ""))
        await StdioTransport(agent, ProtocolServer(McpClient(rig.service, ROOT, known=True)), allocation).serve()
        first, second = sorted(map(json.loads, agent.heard.splitlines()), key=lambda each: "error" in each)
        assert first["id"] == INITIALIZE["id"]
        assert second["error"]["data"]["code"] == "too_many_bytes"
        assert memory.total == EACH - 8 * MIB
        other.free()


async def test_a_request_that_is_cancelled_while_it_comes_holds_nothing(tmp_path: Path) -> None:
    memory = RequestMemory(EACH)
    async with open_address(tmp_path, ConnectionLimits(100), memory=memory) as port:
        _, writer = await connect(port)
        head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {2 * MIB}\r\n\r\n"
        writer.write(head.encode() + b" " * MIB)
        while memory.total < MIB:
            await asyncio.sleep(0.01)
    assert memory.total == 0, "the server cancels what does not end"
    writer.close()
