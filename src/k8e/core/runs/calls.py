"""What doors ask about runs, foreground and background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from k8e.core import checks
from k8e.core.calls import call
from k8e.core.contract import LiveRun
from k8e.core.model import Caller, RunResult, RunSpec, SessionSpec
from k8e.core.parts import Parts
from k8e.core.runs.background import Background
from k8e.core.runs.once import Once
from k8e.core.runs.runs import Runs
from k8e.core.sessions.sessions import Sessions
from k8e.link.model import CommandInfo

PIP_SECONDS: Final = 300.0


class RunCalls:
    """Implements `contract.RunService`."""

    def __init__(self, parts: Parts, sessions: Sessions, runs: Runs, background: Background, once: Once) -> None:
        self._parts = parts
        self._sessions = sessions
        self._runs = runs
        self._background = background
        self._once = once

    @call("run")
    async def run(self, caller: Caller, spec: RunSpec) -> RunResult:
        return await (self._background.start(caller, spec) if spec.background else self._runs.run(caller, spec))

    @call("start")
    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun:
        return await self._runs.start(caller, spec)

    @call("run_once")
    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        return await self._once.run(caller, session, run, keep=keep)

    @call("start_once")
    async def start_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> LiveRun:
        return await self._once.start(caller, session, run, keep=keep)

    @call("signal")
    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        if run := await self._background.find_foreground(caller, run_id):
            await run.signal(number)

    @call("resize")
    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None:
        if run := await self._background.find_foreground(caller, run_id):
            await run.resize(rows, columns)

    @call("kill")
    async def kill(self, caller: Caller, run_id: str) -> None:
        await self._background.kill(caller, run_id)

    @call("poll")
    async def poll(self, caller: Caller, run_id: str) -> RunResult:
        return await self._background.poll(caller, run_id)

    @call("log")
    async def list(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        live = self._sessions.find(caller, session_id)
        return [record.show(live.session_id) for record in await self._parts.store.runs(live.sandbox)]

    @call("ps")
    async def commands(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]:
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, "listing commands"):
            return [command for command in await opened.sandbox.commands() if command.running]

    @call("pip_install")
    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult:
        argv = checks.check_packages(packages)
        spec = RunSpec(session_id, argv=argv, timeout=PIP_SECONDS if seconds is None else seconds)
        return await self._runs.run(caller, spec)
