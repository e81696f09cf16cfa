"""Agents that send more than there is room for: over HTTP, and line by line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from k8e.core.access import Payer
from k8e.core.model import Caller
from k8e.doors.crowd import Crowd
from k8e.doors.freight import Freight
from k8e.doors.mcp.desk import Desk
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.stream import Stream
from tests.core.rig import open_rig
from tests.mcp.agents import INITIALIZE
from tests.mcp.test_doorkeeper import connect, open_address

MIB = 1 << 20
ROOT = Caller(0)
EACH = 32 * MIB


async def test_bodies_that_do_not_end_fill_no_memory(tmp_path: Path) -> None:
    freight = Freight(EACH, patience=0.2)
    async with open_address(tmp_path, Crowd(100), freight=freight) as port:
        most, size = 0, 12 * MIB
        head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        head += f"Accept: application/json, text/event-stream\r\nContent-Length: {size}\r\n\r\n"

        async def send() -> bytes:
            reader, writer = await connect(port)
            answer = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(3):
                    writer.write(head.encode() + b" " * (size - 1))
                    answer = await reader.readuntil(b"}")
            writer.close()
            return answer

        clients = [asyncio.create_task(send()) for _ in range(8)]
        while not all(client.done() for client in clients):
            most = max(most, freight.total)
            await asyncio.sleep(0.01)
        assert 2 * size - 2 <= most <= EACH
        answers = [answer for answer in await asyncio.gather(*clients) if answer]
        assert len(answers) >= 4
        assert all(b" 429 " in answer and b"too_many_bytes" in answer for answer in answers)
        while freight.total:  # who is gone holds nothing
            await asyncio.sleep(0.01)


class Agent:
    """Says who it is, and begins a line that never ends."""

    def __init__(self, size: int) -> None:
        self._pieces = [json.dumps(INITIALIZE).encode() + b"\n", *[b"x" * MIB] * (size // MIB)]
        self.heard = b""

    async def read_piece(self) -> bytes | None:
        return self._pieces.pop(0) if self._pieces else None

    async def send_piece(self, data: bytes) -> None:
        self.heard += data


async def test_a_line_that_does_not_end_is_refused_and_what_was_asked_before_is_answered(tmp_path: Path) -> None:
    freight = Freight(EACH, patience=0.05)
    async with open_rig(tmp_path) as rig:
        other = freight.load(Payer(0, ""))
        await other.add(EACH - 8 * MIB)  # of another agent of the same user
        agent, load = Agent(EACH), freight.load(Payer(0, ""))
        await Stream(agent, Desk(Guest(rig.service, ROOT, "", known=True)), load).serve()
        first, second = sorted(map(json.loads, agent.heard.splitlines()), key=lambda each: "error" in each)
        assert first["id"] == INITIALIZE["id"]
        assert second["error"]["data"]["code"] == "too_many_bytes"
        assert freight.total == EACH - 8 * MIB
        other.free()
