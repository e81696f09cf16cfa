"""Starts foreground runs, and knows those that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Final

from k8e.core.access.turns import Turns
from k8e.core.model import Caller, Chunk, RunResult, RunSpec
from k8e.core.parts import Parts
from k8e.core.runs.endings import ALLOWANCE, Endings, wait_until
from k8e.core.runs.foreground_run import ForegroundRun
from k8e.core.runs.launcher import Facts, Launcher, check_run, place_run
from k8e.core.sessions.interpreters import Interpreters, suits
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.link.model import ExecSpec

# A command that still runs then is put on record with the agent's id, so that the next daemon can say how it ended.
# Without the id it would be ended all the same.
_LONG: Final = 0.05
_STARTS: Final = 32  # commands that are being started at once, of all payers together
_STARTS_EACH: Final = 8  # of one payer
_START: Final = 1.0  # then another command has the place: a sandbox that does not answer costs the daemon nothing


class Foreground:
    def __init__(
        self, parts: Parts, sessions: Sessions, launcher: Launcher, endings: Endings, interpreters: Interpreters
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._launcher = launcher
        self._endings = endings
        self._interpreters = interpreters
        self.running: dict[str, ForegroundRun] = {}
        self.starts = Turns(_STARTS, each=_STARTS_EACH)

    async def run(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> RunResult:
        """In the session that the spec names, or in `live`."""
        return await (await self._start(caller, spec, live, stdin=bool(spec.stdin))).collect(spec.stdin)

    async def start(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> ForegroundRun | NotBegun:
        run = await self._start(caller, spec, live, stdin=True)
        if spec.stdin:
            self._parts.tasks.spawn(run.feed(spec.stdin))
        return run

    async def _start(
        self, caller: Caller, spec: RunSpec, live: Live | None, *, stdin: bool
    ) -> ForegroundRun | NotBegun:
        began = self._parts.clock.monotonic()
        plan = replace(check_run(spec), stdin=stdin)
        due = asyncio.get_running_loop().time() + (plan.timeout or 0) + ALLOWANCE
        live = live or self._sessions.find(caller, spec.session_id)
        record, about = self._launcher.new_record(live, background=False), self._launcher.describe(caller, spec)
        try:
            async with asyncio.timeout_at(due):
                opened = await self._sessions.enter(live)
        except TimeoutError:
            return await self._give_up(live, record, about)
        plan = place_run(opened, plan, spec)
        give_back = self._launcher.quotas.take_run(live.payer)
        launching = self._parts.tasks.spawn(self._launch(opened, plan, record, about, due), watched=True)
        launching.add_done_callback(lambda done: _when_settled(done, give_back))
        try:
            await wait_until({launching}, due)
        except asyncio.CancelledError:
            self._parts.tasks.spawn(self._take_back(launching, record))
            raise
        if not launching.done():
            self._parts.tasks.spawn(self._take_back(launching, record))
            return NotBegun(self._endings.time_out(live, self._endings.measure(record)))
        run = launching.result()
        if isinstance(run, ForegroundRun):
            self._parts.metrics.start_seconds.observe(self._parts.clock.monotonic() - began)
        return run

    async def _give_up(self, live: Live, record: RunRecord, about: Facts) -> NotBegun:
        """The sandbox cannot be reached: nothing ran, and that is on record like every other run."""
        await self._launcher.record_unreachable(live, record, about)
        return NotBegun(self._endings.time_out(live, self._endings.measure(record), began=False))

    async def _launch(
        self, opened: Opened, plan: ExecSpec, record: RunRecord, about: Facts, due: float
    ) -> ForegroundRun | NotBegun:
        with opened.live.in_use():
            with await self.starts.take_briefly(opened.live.payer, _START, due):
                record, mark = await self._launcher.record(opened.live, record, about)
                if asyncio.get_running_loop().time() >= due:
                    return NotBegun(self._endings.come_late(opened.live, record))
                spec = replace(plan, parked=suits(plan))
                process = await self._launcher.start(opened, record, spec)
            self._interpreters.started(spec, process)
            run = ForegroundRun(self._endings, self._parts.tasks, opened.live, record, mark, process, due)
        self.running[run.run_id] = run
        saving = asyncio.get_running_loop().call_later(_LONG, self._save_command, run)
        run.settled.add_done_callback(lambda _: saving.cancel())
        run.settled.add_done_callback(lambda _: self.running.pop(run.run_id, None))
        run.settled.add_done_callback(
            lambda _: self._interpreters.ended(opened.live, opened.sandbox, opened.place, spec)
        )
        return run

    def _save_command(self, run: ForegroundRun) -> None:
        self._parts.tasks.spawn(self._parts.store.set_command(run.run_id, run.command, run.record.oom_before))

    async def _take_back(self, launching: asyncio.Task[ForegroundRun | NotBegun], record: RunRecord) -> None:
        """The caller left while the command was started, or was told that it takes too long."""
        await wait_done(launching)
        run = None if launching.cancelled() or launching.exception() else launching.result()
        if isinstance(run, ForegroundRun):
            run.leave()
        else:
            self._endings.forget(record)


class NotBegun:
    """Implements `contract.LiveRun` for a command of which its sandbox did not say in time that it began."""

    def __init__(self, result: RunResult) -> None:
        self.run_id = result.run_id
        self.session_id = result.session_id
        self.settled: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.settled.set_result(result)

    async def output(self) -> AsyncGenerator[Chunk, None]:
        for _ in ():
            yield Chunk(1, b"")

    async def result(self) -> RunResult:
        return self.settled.result()

    async def collect(self, stdin: bytes) -> RunResult:
        return self.settled.result()

    async def _ignore(self, *_: object, **__: object) -> None:
        pass

    feed = write_stdin = close_stdin = signal = resize = kill = _ignore

    def when_left(self, callback: Callable[[], None]) -> None:
        callback()


def _when_settled(launching: asyncio.Task[ForegroundRun | NotBegun], callback: Callable[[], None]) -> None:
    """Calls back when the command has ended, or has not even started."""
    if launching.cancelled() or launching.exception() is not None:
        callback()
    else:
        launching.result().settled.add_done_callback(lambda _: callback())
