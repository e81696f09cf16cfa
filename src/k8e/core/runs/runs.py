"""The calls of doors about runs, foreground and background."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from k8e.core import checks
from k8e.core.access.access import may_see
from k8e.core.contract import LiveRun
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.model import Caller, Phase, RunResult, RunSpec, SessionSpec, Status
from k8e.core.parts import Parts
from k8e.core.runs.attachment import Attachments
from k8e.core.runs.background import Background
from k8e.core.runs.foreground import Foreground, Once
from k8e.core.runs.foreground_run import ForegroundRun
from k8e.core.runs.launcher import check_packages
from k8e.core.sandbox.output import cut_before
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Registry, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.link.model import CommandInfo

PIP_SECONDS: Final = 300.0
MAX_WAIT: Final = 60.0  # of one poll
# The agent tells only those who are attached that there is something new: others look, less often with time.
_FIRST_LOOK: Final = 0.1
_LAST_LOOK: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Implements `contract.RunService`."""

    _parts: Parts
    _sessions: Sessions
    _registry: Registry
    _foreground: Foreground
    _background: Background
    _once: Once
    _attachments: Attachments

    @call("run")
    async def run(self, caller: Caller, spec: RunSpec) -> RunResult:
        return await (self._background.start(caller, spec) if spec.background else self._foreground.run(caller, spec))

    @call("start")
    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun:
        return await self._foreground.start(caller, spec)

    @call("run_once")
    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        return await self._once.run(caller, session, run, keep=keep)

    @call("start_once")
    async def start_once(
        self,
        caller: Caller,
        session: SessionSpec,
        run: RunSpec,
        *,
        keep: bool = False,
        until: asyncio.Future[None] | None = None,
    ) -> LiveRun:
        return await self._once.start(caller, session, run, keep=keep, until=until)

    @call("pip_install")
    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult:
        argv = check_packages(packages)
        spec = RunSpec(session_id, argv=argv, timeout=PIP_SECONDS if seconds is None else seconds)
        return await self._foreground.run(caller, spec)

    @call("signal")
    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        if run := await self._find_foreground(caller, run_id):
            await run.signal(number)

    @call("resize")
    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None:
        record, _, _ = await self._find(caller, run_id)
        if record.terminal:
            checks.check_size(rows, columns)
            if attachment := self._attachments.find(run_id):
                await attachment.resize(rows, columns)
        elif run := await self._find_foreground(caller, run_id):
            await run.resize(rows, columns)

    @call("kill")
    async def kill(self, caller: Caller, run_id: str) -> bool:
        record, live, _ = await self._find(caller, run_id)
        if run := self._foreground.running.get(run_id):
            await run.end()
            return False
        return live is None or not record.background or await self._background.kill(live, record)

    @call("poll")
    async def poll(
        self, caller: Caller, run_id: str, *, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0
    ) -> RunResult:
        checks.check_number("stdout_from", stdout_from, 0, 1 << 62)
        checks.check_number("stderr_from", stderr_from, 0, 1 << 62)
        end = asyncio.get_running_loop().time() + checks.check_number("wait", wait, 0, MAX_WAIT)
        pause = _FIRST_LOOK
        while True:
            result = await self._poll(caller, run_id, stdout_from, stderr_from)
            rest = end - asyncio.get_running_loop().time()
            if result.status is not Status.RUNNING or result.stdout or result.stderr or rest <= 0:
                return result
            await asyncio.sleep(min(pause, rest))
            pause = min(2 * pause, _LAST_LOOK)

    async def _poll(self, caller: Caller, run_id: str, stdout_from: int, stderr_from: int) -> RunResult:
        record, live, session_id = await self._find(caller, run_id)
        if live is None or not record.background or live.stopped:
            return record.show(session_id)
        found = await self._background.poll(live, record, stdout_from, stderr_from)
        if not stdout_from and not stderr_from:
            return found
        if record.terminal:  # what clients have seen is not kept: there is no first half
            stdout = found.stdout[max(0, stdout_from - (found.stdout_bytes - len(found.stdout))) :]
            return replace(found, stdout=stdout, truncated=found.stdout_bytes - stdout_from > len(stdout))
        stdout = cut_before(found.stdout, found.stdout_bytes, stdout_from)
        stderr = cut_before(found.stderr, found.stderr_bytes, stderr_from)
        missing = found.stdout_bytes - stdout_from > len(stdout) or found.stderr_bytes - stderr_from > len(stderr)
        return replace(found, stdout=stdout, stderr=stderr, truncated=missing)

    @call("log")
    async def list(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        live = self._sessions.find(caller, session_id)
        return [record.show(live.session_id) for record in await self._parts.store.runs(live.sandbox)]

    @call("ps")
    async def commands(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]:
        opened = await self._sessions.open(caller, session_id)
        with self._sessions.using(opened.live, "listing commands"):
            return [command for command in await opened.sandbox.commands() if command.running]

    async def end_all(self, live: Live) -> None:
        """Ends the runs of a session that is being stopped; callers who wait for one have its result."""
        running = [run for run in self._foreground.running.values() if run.live is live]
        await asyncio.gather(*(run.end() for run in running), self._background.end_all(live))
        await wait_done(*(run.settled for run in running))

    async def _find(self, caller: Caller, run_id: str) -> tuple[RunRecord, Live | None, str]:
        """The run, its session if that is not destroyed, and the session's id."""
        checks.check_caller(caller)
        record = await self._parts.store.find_run(checks.check_run_id(run_id))
        live = self._registry.find_sandbox(caller, record.sandbox) if record else None
        if record and live:
            return record, live, live.session_id
        # Also asked for a run that does not exist: another caller's run must not take longer.
        ended = await self._parts.store.find_session(record.sandbox if record else "")
        if record and ended and ended.session.phase is Phase.DESTROYED:
            session = ended.session
            if may_see(caller, session.owner, session.tenant):
                return record, None, session.session_id
        raise Fault(Kind.NOT_FOUND, "run_not_found", f"there is no run {run_id}", hint="Runs end with their session.")

    async def _find_foreground(self, caller: Caller, run_id: str) -> ForegroundRun | None:
        """None: it has ended."""
        record, _, _ = await self._find(caller, run_id)
        if record.background:
            raise Fault(Kind.CONFLICT, "run_in_background", "this run is in the background", hint="It can be killed.")
        return self._foreground.running.get(run_id)
