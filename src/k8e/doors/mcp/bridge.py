"""The program that an agent's pipes end in, for what only it can say: it runs as the user, in the project's folder.

Between it and us go the agent's lines and, marked by a byte that no line of JSON begins with, our own: a question of
ours has a number, and its answer the same. What it answers is a wish of its user's like any other request.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import MAX_MESSAGE
from k8e.doors.http.answers import Json, encode

if TYPE_CHECKING:
    from k8e.doors.mcp.stream import Pieces
    from k8e.doors.request_memory import Allocation

MARK: Final = b"\x1e"
PATIENCE: Final = 60.0  # for an answer; a program that keeps passwords has half of that


class Bridge:
    """Implements `Pieces` for what is the agent's."""

    def __init__(self, pieces: Pieces, load: Allocation) -> None:
        self._load = load
        self._pieces = pieces
        self._fresh = True  # a line begins
        self._told: bytearray | None = None  # of a line of ours that has begun
        self._ended = False
        self._count = 0
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def read_piece(self) -> bytes | None:
        while not self._ended:
            piece = await self._pieces.read_piece()
            if piece is None:
                self._give_up()
                return None
            if lines := self._split(piece):
                return lines
        # The agent has said everything; what it has asked may need answers of ours still.
        self._listening = self._listening or asyncio.create_task(self._listen())
        return None

    async def send_piece(self, data: bytes) -> None:
        await self._pieces.send_piece(data)

    async def ask(self, question: str, **words: object) -> Json:
        """Raises Fault: what the bridge says is wrong, or that it says nothing."""
        self._count += 1
        number = self._count
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._pieces.send_piece(MARK + encode({"id": number, "ask": question, **words}))
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            error = "the program that brings the agent's messages does not answer"
            raise Fault(Kind.UNAVAILABLE, "bridge_silent", error, hint="Connect again.") from None
        finally:
            del self._waiting[number]

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self) -> None:
        try:
            while (piece := await self._pieces.read_piece()) is not None:
                self._split(piece)
        finally:
            self._give_up()

    def _split(self, piece: bytes) -> bytes:
        """What is the agent's."""
        theirs = bytearray()
        while piece:
            if self._told is not None:
                words, end, piece = piece.partition(b"\n")
                if len(self._told) + len(words) <= MAX_MESSAGE and self._load.try_add(len(words)):
                    self._told += words
                else:
                    self._forget()  # which answers nothing
                if end:
                    self._hear(bytes(self._told))
                    self._forget()
                    self._told = None
            elif self._fresh and piece.startswith(MARK):
                self._told, piece = bytearray(), piece[1:]
            else:
                lines, mark, rest = piece.partition(b"\n" + MARK)
                theirs += lines + mark[:1]
                self._fresh = bool(mark) or lines.endswith(b"\n")
                piece = mark[1:] + rest
        return bytes(theirs)

    def _forget(self) -> None:
        self._load.free()
        self._told = bytearray()

    def _hear(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(said, dict):
            return
        if said.get("end") is True:
            self._ended = True
        waiting = self._waiting.get(said["id"]) if isinstance(said.get("id"), int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(said)

    def _give_up(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Fault(Kind.UNAVAILABLE, "bridge_silent", "the agent's connection has ended"))
