"""Starting commands.

A run is on record before its command starts, so that after a crash it is known as lost rather than unknown. Nothing
here starts a command twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Final

from k8e.core import checks
from k8e.core.access.quotas import Quotas
from k8e.core.access.turns import Turns
from k8e.core.egress.denials import Mark
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, Chunk, RunResult, RunSpec
from k8e.core.parts import Parts
from k8e.core.runs.endings import Endings
from k8e.core.runs.foreground import ALLOWANCE, TIMEOUT_GRACE, Foreground, wait_until
from k8e.core.runs.parking import Parking
from k8e.core.sessions.live import Live, Registry
from k8e.core.sessions.provisioning import merge_env
from k8e.core.sessions.sessions import Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translate
from k8e.engine import Place
from k8e.link.errors import LinkError, NotStarted
from k8e.link.model import ExecSpec, Process, TerminalSize

Facts = dict[str, object]

KEPT_RUNS: Final = 1000  # ended ones on record, of one session
# A command that still runs then is put on record with the agent's id, so that the next daemon can say how it ended.
# Without the id it would be ended all the same.
_LONG: Final = 0.05
_STARTS: Final = 32  # commands that are being started at once, of all payers together
_STARTS_EACH: Final = 8  # of one payer
_START: Final = 1.0  # then another command has the place: a sandbox that does not answer costs the daemon nothing


class Runs:
    def __init__(
        self,
        parts: Parts,
        sessions: Sessions,
        registry: Registry,
        *,
        quotas: Quotas,
        parking: Parking,
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._registry = registry
        self._quotas = quotas
        self._parking = parking
        self.endings = Endings(parts, sessions)
        self.running: dict[str, Foreground] = {}
        self.starts = Turns(_STARTS, each=_STARTS_EACH)

    async def run(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> RunResult:
        """In the session that the spec names, or in that one."""
        return await (await self._start(caller, spec, live, stdin=bool(spec.stdin))).collect(spec.stdin)

    async def start(self, caller: Caller, spec: RunSpec, live: Live | None = None) -> Foreground | NotBegun:
        run = await self._start(caller, spec, live, stdin=True)
        if spec.stdin:
            self._parts.tasks.spawn(run.feed(spec.stdin))
        return run

    async def _start(self, caller: Caller, spec: RunSpec, live: Live | None, *, stdin: bool) -> Foreground | NotBegun:
        began = self._parts.clock.monotonic()
        plan = replace(check_run(spec), stdin=stdin)
        due = asyncio.get_running_loop().time() + (plan.timeout or 0) + ALLOWANCE
        live = live or self._sessions.find(caller, spec.session_id)
        record, about = self.new_record(live, background=False), self.describe(caller, spec)
        try:
            async with asyncio.timeout_at(due):
                opened = await self._sessions.enter(live)
        except TimeoutError:
            return await self._give_up(live, record, about)
        plan = place_run(opened, plan, spec)
        give_back = self.take(live)
        launching = self._parts.tasks.spawn(self._launch(opened, plan, record, about, due), watched=True)
        launching.add_done_callback(lambda done: _when_settled(done, give_back))
        try:
            await wait_until({launching}, due)
        except asyncio.CancelledError:
            self._parts.tasks.spawn(self._take_back(launching, record))
            raise
        if not launching.done():
            self._parts.tasks.spawn(self._take_back(launching, record))
            result = self.endings.time_out(live, replace(record, duration_ms=self.endings.since(record.started)))
            return NotBegun(result)
        run = launching.result()
        if isinstance(run, Foreground):
            self._parts.metrics.start_seconds.observe(self._parts.clock.monotonic() - began)
        return run

    async def _give_up(self, live: Live, record: RunRecord, about: Facts) -> NotBegun:
        """There was no way into the sandbox: nothing ran, and that is on record like every other run."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        await self._parts.store.insert_run(record, KEPT_RUNS)
        took = replace(record, duration_ms=self.endings.since(record.started))
        return NotBegun(self.endings.time_out(live, took, began=False))

    def take(self, live: Live) -> Callable[[], None]:
        """Counts one more run of the session's payer, until what is returned is called."""
        return self._quotas.take_run(live.payer, self._registry)

    async def _launch(
        self, opened: Opened, plan: ExecSpec, record: RunRecord, about: Facts, due: float
    ) -> Foreground | NotBegun:
        with opened.live.in_use():
            with await self.starts.take_briefly(opened.live.payer, _START, due):
                record, mark = await self.record(opened.live, record, about)
                if asyncio.get_running_loop().time() >= due:
                    return NotBegun(self.endings.come_late(opened.live, record))
                spec = self._parking.choose(plan)
                process = await self.launch(opened, record, spec)
            self._parking.started(spec, process)
            run = Foreground(self.endings, self._parts.tasks, opened.live, record, mark, process, due)
        self.running[run.run_id] = run
        saving = asyncio.get_running_loop().call_later(_LONG, self._save_command, run)
        run.settled.add_done_callback(lambda _: saving.cancel())
        run.settled.add_done_callback(lambda _: self.running.pop(run.run_id, None))
        run.settled.add_done_callback(lambda _: self._parking.ended(opened.live, opened.sandbox, opened.place, spec))
        return run

    def _save_command(self, run: Foreground) -> None:
        self._parts.tasks.spawn(self._parts.store.set_command(run.run_id, run.command, run.record.oom_before))

    async def _take_back(self, launching: asyncio.Task[Foreground | NotBegun], record: RunRecord) -> None:
        """Who asked for it left, or was told that it takes too long, while it was started."""
        await wait_done(launching)
        run = None if launching.cancelled() or launching.exception() else launching.result()
        if isinstance(run, Foreground):
            run.leave()
        else:
            self.endings.forget(record)

    def describe(self, caller: Caller, spec: RunSpec) -> Facts:
        return {"caller": caller.label, **self._parts.audit.describe_run(spec)}

    def new_record(self, live: Live, *, background: bool) -> RunRecord:
        return RunRecord(
            run_id=f"run-{secrets.token_hex(8)}",
            sandbox=live.sandbox,
            background=background,
            started=self._parts.clock.wall(),
        )

    async def record(self, live: Live, record: RunRecord, about: Facts) -> tuple[RunRecord, Mark]:
        """Puts it on record and into the audit log; what is refused from now on is refused during the run."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        # At once, because this is on the way of every command.
        inserting = asyncio.ensure_future(self._parts.store.insert_run(record, KEPT_RUNS))
        try:
            before = await self._sessions.examine(live)
            mark = live.refusals.mark()
        finally:
            await wait_done(inserting)
        inserting.result()
        if not before.alive:
            await self.endings.withdraw(record)
            raise self._sessions.describe_loss(live)
        return replace(record, oom_before=before.oom_kills), mark

    async def launch(self, opened: Opened, record: RunRecord, spec: ExecSpec) -> Process:
        try:
            return await opened.sandbox.start(spec)
        except NotStarted as error:
            await self.endings.withdraw(record)
            raise translate(error, "the command") from error
        except ValueError as error:  # what only the link can measure
            await self.endings.withdraw(record)
            raise Fault(Kind.INVALID, "invalid_argument", str(error), field="argv") from error
        except LinkError as error:
            await self.endings.conclude(opened.live, record, error)
            raise translate(error, "starting the command") from error


class NotBegun:
    """Implements `contract.LiveRun` for a command of which its sandbox did not say in time that it began."""

    def __init__(self, result: RunResult) -> None:
        self._result = result
        self.settled: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.settled.set_result(result)

    @property
    def run_id(self) -> str:
        return self._result.run_id

    @property
    def session_id(self) -> str:
        return self._result.session_id

    async def output(self) -> AsyncGenerator[Chunk, None]:
        for _ in ():
            yield Chunk(1, b"")

    async def collect(self, stdin: bytes) -> RunResult:
        return self._result

    async def feed(self, stdin: bytes) -> None:
        pass

    async def write_stdin(self, data: bytes) -> None:
        pass

    async def close_stdin(self) -> None:
        pass

    async def signal(self, number: int) -> None:
        pass

    async def resize(self, rows: int, columns: int) -> None:
        pass

    async def result(self) -> RunResult:
        return self._result

    async def kill(self) -> None:
        pass


def _when_settled(launching: asyncio.Task[Foreground | NotBegun], callback: Callable[[], None]) -> None:
    """Calls back when the command has ended, or has not even started."""
    if launching.cancelled() or launching.exception() is not None:
        callback()
    else:
        launching.result().settled.add_done_callback(lambda _: callback())


def check_run(spec: RunSpec) -> ExecSpec:
    """The command as far as it is known without its sandbox."""
    env = checks.check_env("env", spec.env)
    checks.check_content("stdin", spec.stdin)
    if spec.terminal is not None:
        checks.check_terminal(spec.terminal)
        if spec.background:
            checks.refuse("terminal", "is for commands that somebody waits for", "Leave out background.")
    return ExecSpec(
        checks.check_argv(spec),
        env,
        checks.check_path("workdir", spec.workdir) if spec.workdir else b"",
        timeout=checks.check_timeout(spec.timeout),
        grace=TIMEOUT_GRACE,
        terminal=TerminalSize(spec.terminal.rows, spec.terminal.columns) if spec.terminal else None,
    )


def place_run(opened: Opened, plan: ExecSpec, spec: RunSpec) -> ExecSpec:
    place = opened.place
    kind = ((b"TERM", spec.terminal.term.encode()),) if spec.terminal and spec.terminal.term else ()
    env = merge_env(place.env, opened.live.env, kind, plan.env)
    argv = complete_argv(place, plan.argv) if spec.entrypoint else plan.argv
    return replace(
        plan,
        argv=argv,
        env=env,
        cwd=plan.cwd or opened.live.session.workdir.encode() or place.workdir,
        identity=place.user,
        keep_capabilities=place.capable,
    )


def complete_argv(place: Place, argv: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """What the image puts before a command, unless somebody has typed it already, or its own command."""
    first = place.entrypoint[0] if place.entrypoint else b""
    if argv and argv[0] in (first, first.rpartition(b"/")[2]):
        return argv
    complete = (*place.entrypoint, *(argv or place.command))
    if not complete:
        checks.refuse("argv", "is empty, and the image has no command of its own")
    return complete
