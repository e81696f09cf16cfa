"""Background runs: started detached, kept by the agent, collected when they have ended.

While a command runs, its output stays with the agent (the first and the last half MiB of each stream), so that a daemon
that dies loses nothing; a caller who polls sees it there. When the command has ended, the daemon reads its output
without acknowledging it, keeps it in a file inside the sandbox and writes down how the command ended. Only then may the
agent forget it: a daemon that dies anywhere between leaves all of it to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import warn
from k8e.core.model import OUTPUT_LIMIT, Caller, Denials, RunResult, RunSpec, Status
from k8e.core.parts import Parts
from k8e.core.runs.attachment import Attachments
from k8e.core.runs.endings import (
    ALLOWANCE,
    GRACE,
    Endings,
    describe_silence,
    end_command,
    put_away,
    record_outcome,
    wait_until,
)
from k8e.core.runs.kept_output import KeptOutput
from k8e.core.runs.launcher import Facts, Launcher, check_run
from k8e.core.sandbox.output import read_all, read_so_far
from k8e.core.sessions.ends import describe_end
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Observer, Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translated
from k8e.link.errors import AgentError, Code, LinkError
from k8e.link.model import CommandInfo, ExecSpec, Outcome, Sandbox

T = TypeVar("T")

MAX_BACKGROUND: Final = 256  # running ones, of one session
_PAUSE: Final = 0.01  # the agent tells only those who are attached that a command has ended
_GLANCE: Final = 5.0
_ANSWER: Final = 10.0  # within which callers hear something, whatever the sandbox does
_START: Final = 30.0  # the same for a start
_LOOKS: Final = round(2 * GRACE / _PAUSE)  # then the order is given again: it may have been lost with a connection


class Background:
    def __init__(
        self,
        parts: Parts,
        sessions: Sessions,
        observer: Observer,
        launcher: Launcher,
        endings: Endings,
        attachments: Attachments,
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._observer = observer
        self._launcher = launcher
        self._endings = endings
        self._attachments = attachments
        self._store = parts.store
        self._output = KeptOutput(parts.store)

    # Starting

    async def start(self, caller: Caller, spec: RunSpec) -> RunResult:
        plan = check_run(spec)
        if spec.stdin:
            checks.refuse("stdin", "cannot be given to a background run", "Write it to a file that the command reads.")
        return (await self._start(caller, spec, plan)).show(spec.session_id)

    async def open(self, caller: Caller, spec: RunSpec) -> RunRecord:
        """Starts a command on a terminal, for clients to attach to. It has no time limit."""
        return await self._start(caller, spec, replace(check_run(spec), timeout=None))

    async def _start(self, caller: Caller, spec: RunSpec, plan: ExecSpec) -> RunRecord:
        live = self._sessions.find(caller, spec.session_id)
        due = asyncio.get_running_loop().time() + min(plan.timeout or _START, _START) + ALLOWANCE
        try:
            async with asyncio.timeout_at(due):
                opened = await self._sessions.enter(live)
                if len(live.background) >= MAX_BACKGROUND:
                    hint, error = "Poll or kill some of them.", f"{MAX_BACKGROUND} runs are in the background"
                    raise Fault(Kind.EXHAUSTED, "too_many_runs", error, hint=hint)
                plan, give_back = await self._launcher.place(opened, plan, spec)
        except TimeoutError:
            self._sessions.doubt(live)
            raise describe_silence("reaching the sandbox") from None
        about = self._launcher.describe(caller, spec)
        launching = self._parts.tasks.spawn(self._launch(opened, plan, about, give_back, due), watched=True)
        launching.add_done_callback(lambda _: give_back())
        try:
            await wait_until({launching}, due)
        except asyncio.CancelledError:
            self._parts.tasks.spawn(self._take_back(live, launching))
            raise
        if not launching.done():
            self._parts.tasks.spawn(self._take_back(live, launching))
            self._sessions.doubt(live)
            raise describe_silence("starting the command")
        return launching.result()

    async def _launch(
        self, opened: Opened, plan: ExecSpec, about: Facts, give_back: Callable[[], None], due: float
    ) -> RunRecord:
        live = opened.live
        with live.in_use():
            terminal = plan.terminal is not None
            new = self._launcher.new_record(live, background=True, terminal=terminal)
            record, mark = await self._launcher.record(live, new, about)
            if asyncio.get_running_loop().time() >= due:
                self._endings.come_late(live, record)
                raise describe_silence("starting the command")
            spec = replace(plan, stdin=terminal, detached=True, window=OUTPUT_LIMIT)
            live.background.add(record.run_id, mark, terminal=terminal)
            give_back()  # the session counts it from here on
            if terminal:
                self._attachments.expect(record.run_id)
            try:
                process = await self._launcher.start(opened, record, spec)
                try:
                    self._store.set_command(record.run_id, process.id, record.oom_before)
                    await self._store.secure(record.sandbox)
                    record = replace(record, command=process.id)
                except Fault:
                    await put_away(opened.sandbox, process.id)  # without its id on record no daemon finds it again
                    raise
            except BaseException:
                live.background.discard(record.run_id)
                self._attachments.expect_no_more(record.run_id)
                raise
        return record

    async def _take_back(self, live: Live, launching: asyncio.Task[RunRecord]) -> None:
        """The caller left without the id of the run, so no caller will ever ask for it."""
        await wait_done(launching)
        if not launching.cancelled() and launching.exception() is None:
            await self.kill(live, launching.result())

    # Asking

    async def poll(self, live: Live, record: RunRecord, stdout_from: int = 0, stderr_from: int = 0) -> RunResult:
        """Output up to these bytes is known to the caller: it is not read where there is no more."""
        try:
            return await self._answer(live, self._poll(live, record, stdout_from, stderr_from))
        except TimeoutError:
            return self._show_silent(live, record)

    def _show_silent(self, live: Live, record: RunRecord) -> RunResult:
        """A run of which the sandbox says nothing, without its output, which is there. It is `running` even when its
        time is over, because it may have ended in any way; the session of a sandbox that stays silent is ended."""
        if record.finished is None:
            record = self._endings.measure(record)
        elif record.kept_stdout or record.kept_stderr:
            record = replace(record, truncated=True)
        return replace(record.show(live.session_id), reason=f"the sandbox did not answer within {_ANSWER:g} s")

    async def _answer(self, live: Live, work: Coroutine[Any, Any, T]) -> T:
        """Does the work to its end, although the caller may leave, or hear before (TimeoutError) that the sandbox does
        not answer: given up half way, the work would leave a connection attached to the command."""
        task = self._parts.tasks.spawn(work, watched=True)
        await wait_done(task, timeout=_ANSWER)
        if not task.done():
            self._sessions.doubt(live)
            raise TimeoutError
        return task.result()

    async def _poll(self, live: Live, record: RunRecord, stdout_from: int, stderr_from: int) -> RunResult:
        with live.in_use(), translated("collecting the run"):
            async with live.background.collecting:
                record = await self._store.find_run(record.run_id) or record
                opened = await self._sessions.enter(live)
                if record.finished is not None:
                    return await self._output.show(opened, record)
                info = await self.look(opened, record)
                if info is not None and self._attachments.find(record.run_id):
                    return await self._peek(opened, record, info, news=False)  # its output is the client's
                if info is not None and info.running:
                    news = info.stdout_bytes > stdout_from or info.stderr_bytes > stderr_from
                    return await self._peek(opened, record, info, news=news)
                return await self._collect(opened, record, info)

    async def _peek(self, opened: Opened, record: RunRecord, info: CommandInfo, *, news: bool) -> RunResult:
        """A run that goes on, with its output so far, unless there is nothing new in it."""
        stdout = stderr = b""
        try:
            if news:
                async with asyncio.timeout(_GLANCE):
                    stdout, stderr = await read_so_far(opened.sandbox, info)
        except (LinkError, TimeoutError) as error:  # it has ended this moment, or is slow: the next poll shows more
            warn("no_glance", run=record.run_id, cause=error)
        await self._observer.observe(opened.live)
        seen = replace(
            self._endings.measure(record),
            stdout_bytes=info.stdout_bytes,
            stderr_bytes=info.stderr_bytes,
            truncated=len(stdout) < info.stdout_bytes or len(stderr) < info.stderr_bytes,
            denied=self._denied(opened.live, record),
        )
        return seen.show(opened.live.session_id, stdout, stderr)

    async def look(self, opened: Opened, record: RunRecord) -> CommandInfo | None:
        commands = await opened.sandbox.commands()
        return next((info for info in commands if info.id == record.command), None)

    async def kill(self, live: Live, record: RunRecord) -> bool:
        """Returns when the command has ended, and whether it had ended before."""
        try:
            return await self._answer(live, self._kill(live, record))
        except TimeoutError:
            raise describe_silence("killing the run") from None

    async def _kill(self, live: Live, record: RunRecord) -> bool:
        with live.in_use(), translated("killing the run"):
            async with live.background.collecting:
                record = await self._store.find_run(record.run_id) or record
                if record.finished is not None:
                    return True
                opened = await self._sessions.enter(live)
                info = await self.look(opened, record)
                had_ended = info is None or not info.running
                while info is not None and info.running:
                    await self._stop(opened, record, info)
                    info = await self.look(opened, record)
                await self._attachments.settle(record.run_id)
                await self._collect(opened, record, info)
                return had_ended

    async def _stop(self, opened: Opened, record: RunRecord, info: CommandInfo) -> None:
        """Reads nothing: while no connection is attached the agent keeps the output as it always does. A client that
        is at the terminal sees the end; one that does not read it is sent away the second time."""
        attachment = self._attachments.find(record.run_id)
        if attachment is not None and not attachment.ending:
            await attachment.end(GRACE)
        else:
            await self._attachments.settle(record.run_id)
            process = await opened.sandbox.attach(info.id, hold=True)
            await process.end(GRACE)
            await process.detach()
        for _ in range(_LOOKS):
            commands = await opened.sandbox.commands()
            if not any(one.id == info.id and one.running for one in commands):
                return
            await asyncio.sleep(_PAUSE)

    async def end_all(self, live: Live) -> None:
        """Ends the runs of a session that is being stopped. Their output goes with the sandbox's memory."""
        records = await self._store.runs(live.sandbox, unfinished=True)
        mine = {run.command: run for run in records if run.background and run.command is not None}
        if not mine:
            return
        error, hint = "the session was stopped, and the terminal with it", f"k8e sandbox start {live.session_id}"
        for run in mine.values():
            fault = Fault(Kind.LOST, "session_stopped", error, hint=hint, run_id=run.run_id)
            await self._attachments.part(run.run_id, fault)
        sandbox, _ = await self._parts.engine.attach(live.sandbox)
        commands = [info for info in await sandbox.commands() if info.id in mine]
        await asyncio.gather(*(self._end(live, sandbox, info, mine[info.id]) for info in commands))

    async def _end(self, live: Live, sandbox: Sandbox, info: CommandInfo, record: RunRecord) -> None:
        outcome = await end_command(sandbox, info.id, running=info.running)
        ended = record_outcome(record, outcome, stdout=0, stderr=0)
        reason = describe_end(live.record.reason) if info.running else ""
        self._endings.keep(replace(ended, reason=reason), live)

    # Collecting

    async def collect(self, live: Live) -> None:
        """Collects the runs of a session that have ended, and thereby finds out which still run."""
        if live.background:
            try:
                await self._answer(live, self._collect_all(live))
            except TimeoutError:
                raise describe_silence("collecting runs") from None

    async def _collect_all(self, live: Live) -> None:
        async with live.background.collecting:
            # In this order: what is on record here was started before the agent is asked.
            records = await self._store.runs(live.sandbox, unfinished=True)
            opened = await self._sessions.enter(live)
            with translated("collecting runs"):
                commands = {info.id: info for info in await opened.sandbox.commands()}
                for record in records:
                    if not record.background or record.command is None or self._attachments.waits_for(record.run_id):
                        continue
                    info = commands.get(record.command)
                    if info is None or not info.running:
                        await self._collect(opened, record, info)

    async def _collect(self, opened: Opened, record: RunRecord, info: CommandInfo | None) -> RunResult:
        if info is None or record.command is None:
            return await self._lose(opened.live, record)
        try:
            outcome, stdout, stderr = await read_all(opened.sandbox, record.command)
        except AgentError as error:
            if error.code not in (Code.LOST, Code.UNKNOWN_COMMAND):
                raise
            result = await self._lose(opened.live, record)
        else:
            result = await self._finish(opened, record, outcome, stdout, stderr)
        # Once it is on record for good the agent may forget it.
        await self._store.secure(record.sandbox)
        await opened.sandbox.release(record.command)
        await self._launcher.clear(opened, record)
        return result

    def _denied(self, live: Live, record: RunRecord) -> Denials:
        return live.refusals.since(live.background.find_mark(record.run_id), live.session_id)

    async def _lose(self, live: Live, record: RunRecord) -> RunResult:
        live.background.discard(record.run_id)
        return self._endings.keep(replace(record, status=Status.LOST), live)

    async def _finish(
        self, opened: Opened, record: RunRecord, outcome: Outcome, stdout: bytes, stderr: bytes
    ) -> RunResult:
        live = opened.live
        # When it ended, and beside which other runs, is not known any more: it counts as one of several.
        ended = await self._endings.judge(live, record, outcome, alone=False, stdout=len(stdout), stderr=len(stderr))
        ended = replace(ended, denied=self._denied(live, record))
        if await self._output.write(opened, record.run_id, stdout, stderr):
            kept = replace(ended, kept_stdout=len(stdout), kept_stderr=len(stderr))
        else:
            kept = replace(ended, truncated=True)
        result = self._endings.keep(kept, live)
        live.background.discard(record.run_id)
        live.touch()
        return replace(result, stdout=stdout, stderr=stderr, truncated=ended.truncated)
