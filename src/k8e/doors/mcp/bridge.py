"""Questions to the bridge (`k8e sandbox-mcp`), which runs as the client's user in the project's folder and so can read
what the daemon may not.

The connection to the bridge carries the client's lines and, marked by a byte that no line of JSON begins with, the
lines between the daemon and the bridge: a question with a number, and an answer with the same number. The daemon checks
an answer like any other request of the user.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import MAX_MESSAGE
from k8e.doors.http.answers import Json, encode

if TYPE_CHECKING:
    from k8e.doors.mcp.transport.stdio import ByteStream
    from k8e.doors.request_memory import Allocation

MARK: Final = b"\x1e"
PATIENCE: Final = 60.0  # for an answer; the bridge gives a credential helper half of that


class Bridge:
    """A `ByteStream` of the client's lines alone."""

    def __init__(self, stream: ByteStream, allocation: Allocation) -> None:
        self._allocation = allocation
        self._stream = stream
        self._at_start = True  # of a line
        self._line: bytearray | None = None  # a line of the bridge that has begun
        self._ended = False
        self._count = 0
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def read_piece(self) -> bytes | None:
        while not self._ended:
            piece = await self._stream.read_piece()
            if piece is None:
                self._fail_all()
                return None
            if lines := self._split(piece):
                return lines
        # The client sends no more; its calls may still need answers of the bridge.
        self._reading = self._reading or asyncio.create_task(self._read_answers())
        return None

    async def send_piece(self, data: bytes) -> None:
        await self._stream.send_piece(data)

    async def ask(self, question: str, **words: object) -> Json:
        """Raises Fault when the bridge does not answer."""
        self._count += 1
        number = self._count
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._stream.send_piece(MARK + encode({"id": number, "ask": question, **words}))
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            error = "the program that brings the agent's messages does not answer"
            raise Fault(Kind.UNAVAILABLE, "bridge_silent", error, hint="Connect again.") from None
        finally:
            del self._waiting[number]

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read_answers(self) -> None:
        try:
            while (piece := await self._stream.read_piece()) is not None:
                self._split(piece)
        finally:
            self._fail_all()

    def _split(self, piece: bytes) -> bytes:
        """Takes the bridge's lines out, and returns the client's."""
        lines_of_client = bytearray()
        while piece:
            if self._line is not None:
                words, end, piece = piece.partition(b"\n")
                if len(self._line) + len(words) <= MAX_MESSAGE and self._allocation.try_add(len(words)):
                    self._line += words
                else:
                    self._drop()  # too long: it answers nothing
                if end:
                    self._take_answer(bytes(self._line))
                    self._drop()
                    self._line = None
            elif self._at_start and piece.startswith(MARK):
                self._line, piece = bytearray(), piece[1:]
            else:
                lines, mark, rest = piece.partition(b"\n" + MARK)
                lines_of_client += lines + mark[:1]
                self._at_start = bool(mark) or lines.endswith(b"\n")
                piece = mark[1:] + rest
        return bytes(lines_of_client)

    def _drop(self) -> None:
        self._allocation.free()
        self._line = bytearray()

    def _take_answer(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(answer, dict):
            return
        if answer.get("end") is True:
            self._ended = True
        waiting = self._waiting.get(answer["id"]) if isinstance(answer.get("id"), int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail_all(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Fault(Kind.UNAVAILABLE, "bridge_silent", "the agent's connection has ended"))
