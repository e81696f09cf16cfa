"""Starts foreground runs, in a session or in one that is made for a single command, and knows those that run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from k8e.core.access.access import Payer, choose_tenant, find_payer
from k8e.core.access.turns import Turns
from k8e.core.contract import LiveRun
from k8e.core.errors import Fault
from k8e.core.log.daemon_log import warn
from k8e.core.model import Caller, Chunk, RunResult, RunSpec, SessionSpec
from k8e.core.parts import Parts
from k8e.core.runs.endings import ALLOWANCE, Endings, wait_until
from k8e.core.runs.foreground_run import TIDY, ForegroundRun
from k8e.core.runs.launcher import Facts, Launcher, check_run
from k8e.core.sandbox.programs import find_long_program
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.ends import DESTROYED, FINISHED
from k8e.core.sessions.interpreters import Interpreters, suits
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Opened, Registry, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import do_by, wait_done, wait_first
from k8e.delays import Delays
from k8e.link.model import ExecSpec

# A command that still runs then is put on record with the agent's id, so that the next daemon can say how it ended.
# Without the id it would be ended all the same.
_LONG: Final = 0.05
_STARTS: Final = 32  # commands that are being started at once, of all payers together
_STARTS_EACH: Final = 8  # of one payer
# Sandboxes of one payer that are being taken down, before the next is made: a payer who starts more than that waits,
# instead of reaching a quota with sessions that have ended already.
_LEAVING: Final = 8
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
        self._long = Delays(_LONG)

    async def run(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> RunResult:
        """In the session that the spec names, or in `live`."""
        start = await self._prepare(caller, spec, live, stdin=bool(spec.stdin))
        if isinstance(start, NotBegun):
            return await start.result()
        running = self._parts.tasks.spawn(self._run(start, spec.stdin), watched=True)
        running.add_done_callback(lambda _: start.give_back())
        try:
            await start.wait(running)
            if not running.done() and start.record.run_id in self.running:
                await wait_done(running)  # it has begun, and knows itself how long it may take
        except asyncio.CancelledError:
            self._take_back(start, running)
            raise
        if running.done():
            return running.result()
        self._take_back(start, running)
        return self._endings.time_out(start.opened.live, self._endings.measure(start.record))

    async def _run(self, start: _Start, stdin: bytes) -> RunResult:
        """One task from the start to the result: every further one would cost as much as a tenth of `true`."""
        task: asyncio.Task[RunResult] | None = asyncio.current_task()
        assert task is not None
        return await (await self._launch(start, task)).collect(stdin)

    async def start(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> ForegroundRun | NotBegun:
        start = await self._prepare(caller, spec, live, stdin=True)
        if isinstance(start, NotBegun):
            return start
        launching = self._parts.tasks.spawn(self._launch(start), watched=True)
        launching.add_done_callback(lambda done: _when_settled(done, start.give_back))
        try:
            await wait_until({launching}, start.due)
        except asyncio.CancelledError:
            self._take_back(start, launching)
            raise
        if not launching.done():
            self._take_back(start, launching)
            return NotBegun(self._endings.time_out(start.opened.live, self._endings.measure(start.record)))
        run = launching.result()
        if spec.stdin:
            self._parts.tasks.spawn(run.feed(spec.stdin))
        return run

    async def _prepare(self, caller: Caller, spec: RunSpec, live: Live | None, *, stdin: bool) -> _Start | NotBegun:
        began = self._parts.clock.monotonic()
        plan = check_run(spec, stdin=stdin)
        due = asyncio.get_running_loop().time() + (plan.timeout or 0) + ALLOWANCE
        live = live or self._sessions.find(caller, spec.session_id)
        record, about = self._launcher.new_record(live, background=False), self._launcher.describe(caller, spec)
        try:
            opened, plan, give_back = await do_by(due, self._place(live, plan, spec))
        except TimeoutError:
            # The sandbox cannot be reached: nothing ran, and that is on record like every other run.
            await self._launcher.record_unreachable(live, record, about)
            return NotBegun(self._endings.time_out(live, self._endings.measure(record), began=False))
        if suits(plan):
            plan = replace(plan, parked=True)
        return _Start(opened, plan, record, about, due, began, give_back)

    async def _place(self, live: Live, plan: ExecSpec, spec: RunSpec) -> tuple[Opened, ExecSpec, Callable[[], None]]:
        opened = await self._sessions.enter(live)
        return opened, *await self._launcher.place(opened, plan, spec)

    async def _launch(self, start: _Start, settled: asyncio.Task[RunResult] | None = None) -> ForegroundRun | NotBegun:
        opened, record, spec = start.opened, start.record, start.spec
        with opened.live.in_use():
            with await self.starts.take_briefly(opened.live.payer, _START, start.due):
                record, mark = await self._launcher.record(opened.live, record, start.about)
                if asyncio.get_running_loop().time() >= start.due:
                    return NotBegun(self._endings.come_late(opened.live, record))
                process = await self._launcher.start(opened, record, spec)
            self._interpreters.started(opened.live, opened.sandbox, opened.place, spec, process)
            run = ForegroundRun(
                *(self._endings, self._parts.tasks, opened.live, record, mark, process, start.due), settled=settled
            )
        self._parts.metrics.start_seconds.observe(self._parts.clock.monotonic() - start.began)
        self.running[run.run_id] = run
        saving = self._long.add(lambda: self._save_command(run))

        def end(_: object) -> None:
            self._long.remove(saving)
            self.running.pop(run.run_id, None)
            self._interpreters.ended(opened.live, opened.sandbox, opened.place, spec, process)
            if find_long_program(spec.argv) is not None:
                self._parts.tasks.spawn(self._launcher.clear(opened, record))

        run.settled.add_done_callback(end)
        if start.left:
            run.leave()
        return run

    def _save_command(self, run: ForegroundRun) -> None:
        try:
            self._parts.store.set_command(run.run_id, run.command, run.record.oom_before)
        except Fault as fault:
            warn("command_not_recorded", run=run.run_id, code=fault.code, detail=fault.detail)

    def _take_back(self, start: _Start, work: asyncio.Task[Any]) -> None:
        """The caller left, or was told that it takes too long: the command is ended, as soon as it has begun."""
        start.left = True
        run = self.running.get(start.record.run_id)
        if run is not None:
            run.leave()
            return

        def forget(_: object) -> None:
            if start.record.run_id not in self.running:
                self._endings.forget(start.record)

        work.add_done_callback(forget)


@dataclass(slots=True, eq=False)
class _Start:
    """A command that is about to be started."""

    opened: Opened
    spec: ExecSpec
    record: RunRecord
    about: Facts
    due: float  # when the caller has to have its answer, in the loop's time
    began: float
    give_back: Callable[[], None]  # the place among the payer's runs
    left: bool = False  # no caller waits for it any more
    _roused: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def rouse(self, _: object = None) -> None:
        """Its task has ended, or it is late."""
        if not self._roused.done():
            self._roused.set_result(None)

    async def wait(self, running: asyncio.Task[RunResult]) -> None:
        """As `wait_until`, in a third of the calls. What else happens at the task's end has happened when this returns:
        the caller may ask for the next run at once."""
        running.add_done_callback(self.rouse)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(self.due, self.rouse)
        try:
            await self._roused
        finally:
            timer.cancel()
        if not running.done():
            await wait_until({running}, self.due)


class NotBegun:
    """Implements `contract.LiveRun` for a command of which its sandbox did not say in time that it began."""

    def __init__(self, result: RunResult) -> None:
        self.run_id = result.run_id
        self.session_id = result.session_id
        self.settled: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.settled.set_result(result)

    async def output(self) -> AsyncGenerator[Chunk, None]:
        for _ in ():
            yield Chunk(1, ())

    async def result(self) -> RunResult:
        return self.settled.result()

    async def collect(self, stdin: bytes) -> RunResult:
        return self.settled.result()

    async def _ignore(self, *_: object, **__: object) -> None:
        pass

    feed = write_stdin = close_stdin = signal = resize = kill = _ignore

    def when_left(self, callback: Callable[[], object]) -> None:
        callback()


def _when_settled(launching: asyncio.Task[ForegroundRun | NotBegun], callback: Callable[[], None]) -> None:
    """Calls back when the command has ended, or has not even started."""
    if launching.cancelled() or launching.exception() is not None:
        callback()
    else:
        launching.result().settled.add_done_callback(lambda _: callback())


@dataclass(frozen=True, slots=True, eq=False)
class Once:
    """One-command sessions: a session that is made for one command and ends with it.

    One request brings both, so that no session waits for a caller who is gone already. That it is for one command is on
    record before the sandbox exists: a daemon that finds such a session after a crash removes it. The caller has the
    result when the command has ended; the sandbox is taken down after that, and counts until then. With a directory of
    the machine that it can write to, the caller has the result when the sandbox is gone: until then placeholders stand
    in the directory, and the caller's next step there must not find them.
    """

    _lifecycle: Lifecycle
    _registry: Registry
    _creation: Creation
    _foreground: Foreground

    async def start(
        self,
        caller: Caller,
        session: SessionSpec,
        run: RunSpec,
        *,
        keep: bool,
        until: asyncio.Future[None] | None = None,
    ) -> LiveRun:
        live = await self._make(caller, session, run, keep=keep)
        try:
            started = await self._foreground.start(caller, run, live)
        except Fault:
            await self._tidy(live, self._lifecycle.end(live, DESTROYED if keep else FINISHED))
            raise
        except BaseException:
            self._lifecycle.end(live, DESTROYED if keep else FINISHED)
            raise
        if not keep:
            started.when_left(lambda: self._end_after(live, started, until))
        return started

    async def run(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> RunResult:
        live = await self._make(caller, session, run, keep=keep)
        try:
            result = await self._foreground.run(caller, run, live)
        finally:
            ending = None if keep else self._lifecycle.end(live, FINISHED)
        if ending is not None:
            await self._tidy(live, ending)
        return result

    async def _tidy(self, live: Live, ending: asyncio.Task[None]) -> None:
        if _has_placeholders(live):
            await wait_done(ending, timeout=TIDY)

    async def _make(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> Live:
        check_run(run)  # before a sandbox is made for nothing
        await self._make_room(find_payer(caller.uid, choose_tenant(caller, session.tenant)))
        named = session if session.session_id else replace(session, session_id=f"run-{secrets.token_hex(4)}")
        return await self._creation.make(caller, named, fleeting=not keep)

    async def _make_room(self, payer: Payer) -> None:
        while len(leaving := [ending for ending in self._endings(payer) if not ending.done()]) >= _LEAVING:
            await wait_first(*leaving)

    def _endings(self, payer: Payer) -> list[asyncio.Task[None]]:
        return [
            live.ending
            for live in self._registry
            if live.record.fleeting and live.ending is not None and live.payer == payer
        ]

    def close(self) -> None:
        """Called after all commands were told to end: no such session outlives the daemon."""
        running = {run.live.sandbox: run for run in self._foreground.running.values()}
        for live in self._registry:
            if live.record.fleeting:
                run = running.get(live.sandbox)
                self._end_with(live, run) if run else self._lifecycle.end(live, FINISHED)

    def _end_after(
        self, live: Live, run: ForegroundRun | NotBegun, until: asyncio.Future[None] | None
    ) -> asyncio.Task[None] | None:
        if until is None or until.done():
            return self._end_with(live, run)
        until.add_done_callback(lambda _: self._end_with(live, run))
        return None

    def _end_with(self, live: Live, run: ForegroundRun | NotBegun) -> asyncio.Task[None] | None:
        """The command has the time to end by itself that every command has: it may have files of the machine open.
        Returns what the caller's result waits for."""
        if run.settled.done():
            ending = self._lifecycle.end(live, FINISHED)
            return ending if _has_placeholders(live) else None
        run.settled.add_done_callback(lambda _: self._lifecycle.end(live, FINISHED))
        return None


def _has_placeholders(live: Live) -> bool:
    """Whether there may be some: empty directories that stand in for kept parts (docs/local-engine.md)."""
    return any(mount.writable and mount.kept for mount in live.session.shape.mounts)
