"""Questions to the bridge (`k8e sandbox-mcp`), which runs as the client's user in the project's folder and so can read
what the daemon may not.

Between the lines of the client go those of the daemon and the bridge, marked by a byte that no line of JSON begins
with: a question with a number, and an answer with the same number. The daemon checks an answer like any other request
of the user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.doors.http.answers import Json
from k8e.profiles.text import to_json

MARK: Final = b"\x1e"
AGAIN: Final = MARK + b'{"again"'  # the first line of a bridge that was connected to an earlier daemon
PATIENCE: Final = 60.0  # for an answer; the bridge gives a credential helper half of that


class Bridge:
    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._count = 0
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self.ended = False  # the client sends no more; the bridge still answers

    async def ask(self, question: str, **words: object) -> Json:
        """Raises Fault when the bridge does not answer."""
        self._count += 1
        number = self._count
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(MARK + to_json({"id": number, "ask": question, **words}))
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            error = "the program that brings the agent's messages does not answer"
            raise Fault(Kind.UNAVAILABLE, "bridge_silent", error, hint="Connect again.") from None
        finally:
            del self._waiting[number]

    def take(self, line: bytes) -> None:
        """Takes a line of the bridge. One that is no answer is ignored."""
        try:
            answer = json.loads(line.removeprefix(MARK))
        except (ValueError, RecursionError):
            return
        if not isinstance(answer, dict):
            return
        if answer.get("end") is True:
            self.ended = True
        waiting = self._waiting.get(answer["id"]) if isinstance(answer.get("id"), int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    Fault(Kind.UNAVAILABLE, "bridge_silent", "the agent's connection has ended", hint="connect again")
                )
