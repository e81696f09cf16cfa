"""A command that an agent waits for: its output as it comes, told in short while it runs, whole at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from k8e.core.contract import LiveRun
from k8e.core.model import OUTPUT_LIMIT, RunResult, RunSpec, SessionSpec
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.outputs import Kept, Recorder

TAIL: Final = 2000  # bytes of the latest output that a notification carries
PAUSE: Final = 0.25  # seconds between two of them

Report = Callable[[float, str], Awaitable[None]]  # bytes so far, the latest of them


class Execution:
    def __init__(self, guest: Guest, report: Report | None, limit: int = OUTPUT_LIMIT) -> None:
        self._guest = guest
        self._report = report
        self._streams = {1: Recorder(limit), 2: Recorder(limit)}
        self._tail = b""
        self._news = asyncio.Event()

    async def run(self, spec: RunSpec, named: str) -> RunResult:
        async def start(session_id: str) -> LiveRun:
            return await self._guest.service.runs.start(self._guest.caller, replace(spec, session_id=session_id))

        return await self._follow(await self._guest.use(named, start))

    async def run_once(self, session: SessionSpec, spec: RunSpec) -> RunResult:
        """In a session that is made for it and does not outlive it."""
        return await self._follow(await self._guest.service.runs.start_once(self._guest.caller, session, spec))

    async def _follow(self, live: LiveRun) -> RunResult:
        reporting = asyncio.create_task(self._tell(self._report)) if self._report else None
        result: RunResult | None = None
        try:
            await live.close_stdin()
            async for chunk in live.output():
                self._streams[chunk.stream].feed(chunk.data)
                self._tail = (self._tail + chunk.data)[-TAIL:]
                self._news.set()
            result = await live.result()
        finally:
            if reporting is not None:
                reporting.cancel()
            if result is None:
                await live.kill()
                self.drop()
        stdout, stderr = (stream.take() for stream in self._streams.values())
        truncated = result.stdout_bytes > len(stdout) or result.stderr_bytes > len(stderr)
        return replace(result, stdout=stdout, stderr=stderr, truncated=truncated)

    async def _tell(self, report: Report) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            total = sum(stream.total for stream in self._streams.values())
            await report(total, self._tail.decode(errors="replace"))
            await asyncio.sleep(PAUSE)

    def kept(self) -> dict[str, Kept]:
        """What the result does not have all of, by the stream's name."""
        found = {"stdout": self._streams[1].keep(), "stderr": self._streams[2].keep()}
        return {name: kept for name, kept in found.items() if kept is not None}

    def drop(self) -> None:
        for stream in self._streams.values():
            stream.drop()
