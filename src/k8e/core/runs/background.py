"""Commands in the background: started detached, kept by the agent, collected when they have ended.

While one runs its output stays where the agent keeps it (the first and the last half MiB of each stream), so that a
daemon that dies loses nothing; who polls meanwhile sees it there. When it has ended the output is read without being
acknowledged and put into a file inside the sandbox that only the agent can read, the row says how it ended, and only
then the agent may forget it: a daemon that dies anywhere between leaves all of it to the next. Output is kept until the
session ends; beyond KEPT_OUTPUT bytes the oldest goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar

from k8e.core import checks
from k8e.core.access.access import may_see
from k8e.core.egress.denials import Mark
from k8e.core.egress.witness import Witness
from k8e.core.errors import Fault, Kind
from k8e.core.log.journal import warn
from k8e.core.model import OUTPUT_LIMIT, Caller, Denials, Phase, RunResult, RunSpec, Status
from k8e.core.parts import Parts
from k8e.core.runs.foreground import ALLOWANCE, GRACE, Foreground, wait_until
from k8e.core.runs.output import HeadTail
from k8e.core.runs.runs import Facts, Runs, check_run, place_run
from k8e.core.runs.verdict import judge, suspect_oom
from k8e.core.sessions.live import Live, Registry
from k8e.core.sessions.provisioning import STATE, read_into
from k8e.core.sessions.sessions import SILENCE, Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translated
from k8e.link.errors import AgentError, Code, LinkError, LinkLost
from k8e.link.model import ByteReader, CommandInfo, ExecSpec, Outcome, Sandbox

T = TypeVar("T")

MAX_BACKGROUND: Final = 256  # running ones, of one session
KEPT_OUTPUT: Final = 32 << 20  # bytes, of one session
_ATTEMPTS: Final = 3
_PAUSE: Final = 0.01  # the agent tells nobody who is not attached that a command has ended
_GLANCE: Final = 5.0
_ANSWER: Final = 10.0  # within which callers hear something, whatever the sandbox does
_START: Final = 30.0  # likewise, of a start
_LOOKS: Final = round(2 * GRACE / _PAUSE)  # then the order is given again: it may have been lost with a connection


class Background:
    def __init__(self, parts: Parts, sessions: Sessions, registry: Registry, runs: Runs, witness: Witness) -> None:
        self._parts = parts
        self._sessions = sessions
        self._registry = registry
        self._runs = runs
        self._witness = witness
        self._store = parts.store

    # Starting

    async def start(self, caller: Caller, spec: RunSpec) -> RunResult:
        plan = check_run(spec)
        if spec.stdin:
            checks.refuse("stdin", "cannot be given to a background run", "Write it to a file that the command reads.")
        live = self._sessions.find(caller, spec.session_id)
        due = asyncio.get_running_loop().time() + min(plan.timeout or _START, _START) + ALLOWANCE
        try:
            async with asyncio.timeout_at(due):
                opened = await self._sessions.enter(live)
        except TimeoutError:
            self._sessions.doubt(live)
            raise _describe_silence("reaching the sandbox") from None
        if len(opened.live.background) >= MAX_BACKGROUND:
            hint = "Poll or kill some of them."
            raise Fault(Kind.EXHAUSTED, "too_many_runs", f"{MAX_BACKGROUND} runs are in the background", hint=hint)
        plan = place_run(opened, plan, spec)
        give_back = self._runs.take(opened.live)
        about = self._runs.describe(caller, spec)
        launching = self._parts.tasks.spawn(self._launch(opened, plan, about, give_back, due), watched=True)
        launching.add_done_callback(lambda _: give_back())
        try:
            await wait_until({launching}, due)
        except asyncio.CancelledError:
            self._parts.tasks.spawn(self._take_back(caller, launching))
            raise
        if not launching.done():
            self._parts.tasks.spawn(self._take_back(caller, launching))
            self._sessions.doubt(opened.live)
            raise _describe_silence("starting the command")
        return launching.result()

    async def _launch(
        self, opened: Opened, plan: ExecSpec, about: Facts, give_back: Callable[[], None], due: float
    ) -> RunResult:
        live = opened.live
        with live.in_use():
            record, mark = await self._runs.record(live, self._runs.new_record(live, background=True), about)
            if asyncio.get_running_loop().time() >= due:
                self._runs.endings.come_late(live, record)
                raise _describe_silence("starting the command")
            spec = replace(plan, stdin=False, detached=True, window=OUTPUT_LIMIT)
            live.background.add(record.run_id)
            give_back()  # the session counts it from here on
            live.marks[record.run_id] = mark
            try:
                process = await self._runs.launch(opened, record, spec)
                try:
                    await self._store.set_command(record.run_id, process.id, record.oom_before)
                except Fault:
                    # Nobody could ever find it again.
                    await put_away(opened.sandbox, process.id)
                    raise
            except BaseException:
                self._forget(live, record)
                raise
        return record.show(live.session_id)

    async def _take_back(self, caller: Caller, launching: asyncio.Task[RunResult]) -> None:
        """Who asked for it left before they heard its id: nobody will ever ask for it."""
        await wait_done(launching)
        if not launching.cancelled() and launching.exception() is None:
            await self.kill(caller, launching.result().run_id)

    # Asking

    async def find(self, caller: Caller, run_id: str) -> tuple[RunRecord, Live | None, str]:
        """The run, its session if that lives, and the session's id."""
        checks.check_caller(caller)
        record = await self._store.find_run(checks.check_run_id(run_id))
        live = self._registry.find_sandbox(caller, record.sandbox) if record else None
        if record and live:
            return record, live, live.session_id
        # Asked for one that does not exist, too: somebody else's must not take longer.
        ended = await self._store.find_session(record.sandbox if record else "")
        if record and ended and ended.session.phase is Phase.DESTROYED:
            session = ended.session
            if may_see(caller, session.owner, session.tenant):
                return record, None, session.session_id
        raise Fault(Kind.NOT_FOUND, "run_not_found", f"there is no run {run_id}", hint="Runs end with their session.")

    async def find_foreground(self, caller: Caller, run_id: str) -> Foreground | None:
        """None: it has ended."""
        record, _, _ = await self.find(caller, run_id)
        if record.background:
            raise Fault(Kind.CONFLICT, "run_in_background", "nobody waits for this run", hint="It can be killed.")
        return self._runs.running.get(run_id)

    async def poll(self, caller: Caller, run_id: str) -> RunResult:
        record, live, session_id = await self.find(caller, run_id)
        if live is None or not record.background or live.stopped:
            return record.show(session_id)
        try:
            return await self._undisturbed(live, self._poll(live, record))
        except TimeoutError:
            return self._show_silent(live, record)

    def _show_silent(self, live: Live, record: RunRecord) -> RunResult:
        """One of which the sandbox says nothing: without the output, which is there. Also when its time is over it is
        `running`, because it may have ended in any way; the session of a sandbox that stays silent is ended."""
        shown = replace(record.show(live.session_id), reason=f"the sandbox did not answer within {_ANSWER:g} s")
        if record.finished is None:
            return replace(shown, duration_ms=self._runs.endings.since(record.started))
        return replace(shown, truncated=shown.truncated or bool(record.kept_stdout or record.kept_stderr))

    async def _undisturbed(self, live: Live, work: Coroutine[Any, Any, T]) -> T:
        """To its end, although the caller may leave, or hear before (TimeoutError) that the sandbox does not answer:
        given up half way it would leave the command attached to."""
        task = self._parts.tasks.spawn(work, watched=True)
        await wait_done(task, timeout=_ANSWER)
        if not task.done():
            self._sessions.doubt(live)
            raise TimeoutError
        return task.result()

    async def _poll(self, live: Live, record: RunRecord) -> RunResult:
        with live.in_use(), translated("collecting the run"):
            async with live.collecting:
                record = await self._store.find_run(record.run_id) or record
                opened = await self._sessions.enter(live)
                if record.finished is not None:
                    return await self._recall(opened, record)
                info = await self._look(opened, record)
                if info is not None and info.running:
                    return await self._peek(opened, record, info)
                return await self._collect(opened, record, info)

    async def _peek(self, opened: Opened, record: RunRecord, info: CommandInfo) -> RunResult:
        """How one that runs is doing: whoever waits for it wants to see what it says."""
        try:
            async with asyncio.timeout(_GLANCE):
                stdout, stderr = await _read_so_far(opened.sandbox, info)
        except (LinkError, TimeoutError) as error:  # it has ended this moment, or is slow: the next poll shows more
            warn("no_glance", run=record.run_id, cause=error)
            stdout = stderr = b""
        await self._witness.hear(opened.live)
        seen = replace(
            record,
            stdout_bytes=info.stdout_bytes,
            stderr_bytes=info.stderr_bytes,
            truncated=len(stdout) < info.stdout_bytes or len(stderr) < info.stderr_bytes,
            duration_ms=max(0, round((self._parts.clock.wall() - record.started) * 1000)),
            denied=self._denied(opened.live, record),
        )
        return seen.show(opened.live.session_id, stdout, stderr)

    async def _look(self, opened: Opened, record: RunRecord) -> CommandInfo | None:
        commands = await opened.sandbox.commands()
        return next((info for info in commands if info.id == record.command), None)

    async def _recall(self, opened: Opened, record: RunRecord) -> RunResult:
        session_id = opened.live.session_id
        if not record.kept_stdout and not record.kept_stderr:
            return record.show(session_id)
        try:
            content = await opened.sandbox.read_file(_output_path(record.run_id), limit=2 * OUTPUT_LIMIT)
        except AgentError as error:
            warn("output_gone", run=record.run_id, cause=error.code.name)
            return replace(record, truncated=True).show(session_id)
        border = record.kept_stdout or 0
        return record.show(session_id, content[:border], content[border:])

    async def kill(self, caller: Caller, run_id: str) -> None:
        """Returns when it is gone. Fine for one that has ended already."""
        record, live, _ = await self.find(caller, run_id)
        foreground = self._runs.running.get(run_id)
        if foreground is not None:
            await foreground.end()
        if live is not None and record.background:
            try:
                await self._undisturbed(live, self._kill(live, record))
            except TimeoutError:
                raise _describe_silence("killing the run") from None

    async def _kill(self, live: Live, record: RunRecord) -> None:
        with live.in_use(), translated("killing the run"):
            async with live.collecting:
                record = await self._store.find_run(record.run_id) or record
                if record.finished is not None:
                    return
                opened = await self._sessions.enter(live)
                info = await self._look(opened, record)
                while info is not None and info.running:
                    await self._stop(opened, info)
                    info = await self._look(opened, record)
                await self._collect(opened, record, info)

    async def _stop(self, opened: Opened, info: CommandInfo) -> None:
        """Without reading anything: while nobody is attached the agent keeps its output as it always does."""
        process = await opened.sandbox.attach(info.id, hold=True)
        await process.end(GRACE)
        await process.detach()
        for _ in range(_LOOKS):
            commands = await opened.sandbox.commands()
            if not any(one.id == info.id and one.running for one in commands):
                return
            await asyncio.sleep(_PAUSE)

    # Collecting

    async def collect(self, live: Live) -> None:
        """Brings home what has ended, and thereby finds out what still runs."""
        if live.background:
            try:
                await self._undisturbed(live, self._collect_all(live))
            except TimeoutError:
                raise _describe_silence("collecting runs") from None

    async def _collect_all(self, live: Live) -> None:
        async with live.collecting:
            # In this order: what is on record here was started before the agent is asked.
            records = await self._store.runs(live.sandbox, unfinished=True)
            opened = await self._sessions.enter(live)
            with translated("collecting runs"):
                commands = {info.id: info for info in await opened.sandbox.commands()}
                for record in records:
                    if not record.background or record.command is None:
                        continue
                    info = commands.get(record.command)
                    if info is None or not info.running:
                        await self._collect(opened, record, info)

    async def _collect(self, opened: Opened, record: RunRecord, info: CommandInfo | None) -> RunResult:
        if info is None or record.command is None:
            return await self._lose(opened.live, record)
        try:
            outcome, stdout, stderr = await _read_stubbornly(opened.sandbox, record.command)
        except AgentError as error:
            if error.code not in (Code.LOST, Code.UNKNOWN_COMMAND):
                raise
            result = await self._lose(opened.live, record)
        else:
            result = await self._finish(opened, record, outcome, stdout, stderr)
        # It is on record; now the agent may forget it.
        await opened.sandbox.release(record.command)
        return result

    def _denied(self, live: Live, record: RunRecord) -> Denials:
        # One that an earlier daemon started was under way all the time that this one can look back on.
        return live.refusals.since(live.marks.get(record.run_id) or Mark(), live.session_id)

    def _forget(self, live: Live, record: RunRecord) -> None:
        live.background.discard(record.run_id)
        live.marks.pop(record.run_id, None)

    async def _lose(self, live: Live, record: RunRecord) -> RunResult:
        self._forget(live, record)
        return await self._runs.endings.keep(replace(record, status=Status.LOST), live)

    async def _finish(self, opened: Opened, record: RunRecord, end: Outcome, stdout: bytes, stderr: bytes) -> RunResult:
        live = opened.live
        # When it ended, and beside which other runs, is not known any more.
        kills = (await self._sessions.examine(live)).oom_kills - record.oom_before
        oom = suspect_oom(end.exit_code, end.signal, kills=kills, alone=False)
        status, code = judge(end.exit_code, end.signal, end.cause, oom=oom)
        kept = await self._keep_output(opened, record, stdout, stderr)
        ended = replace(
            record,
            status=status,
            exit_code=code,
            stdout_bytes=end.stdout_bytes,
            stderr_bytes=end.stderr_bytes,
            truncated=len(stdout) < end.stdout_bytes or len(stderr) < end.stderr_bytes,
            duration_ms=round(end.wall_seconds * 1000),
            kept_stdout=len(stdout) if kept else None,
            kept_stderr=len(stderr) if kept else None,
            denied=self._denied(live, record),
        )
        result = await self._runs.endings.keep(ended if kept else replace(ended, truncated=True), live)
        self._forget(live, record)
        live.touch()
        return replace(result, stdout=stdout, stderr=stderr, truncated=ended.truncated)

    async def _keep_output(self, opened: Opened, record: RunRecord, stdout: bytes, stderr: bytes) -> bool:
        if not stdout and not stderr:
            return True
        await self._make_room(opened, len(stdout) + len(stderr))
        try:
            await opened.sandbox.write_file(_output_path(record.run_id), stdout + stderr, mode=0o600)
        except AgentError as error:
            # Most likely its disk is full: whoever collected it has it, nobody else will.
            warn("output_not_kept", run=record.run_id, cause=error.code.name)
            return False
        return True

    async def _make_room(self, opened: Opened, size: int) -> None:
        records = await self._store.runs(opened.live.sandbox)
        kept = [(run.run_id, (run.kept_stdout or 0) + (run.kept_stderr or 0)) for run in records]
        excess = sum(length for _, length in kept) + size - KEPT_OUTPUT
        dropped = []
        for run_id, length in kept:
            if excess <= 0:
                break
            if length:
                dropped.append(run_id)
                excess -= length
        await self._store.forget_output(dropped)
        for run_id in dropped:
            await opened.sandbox.remove(_output_path(run_id))


def _describe_silence(subject: str) -> Fault:
    hint = f"It may or may not have happened. A sandbox that stays silent for {SILENCE:g} s is ended."
    return Fault(Kind.LOST, "sandbox_unreachable", f"{subject}: the sandbox did not answer in time", hint=hint)


def _output_path(run_id: str) -> bytes:
    return STATE + b"/" + run_id.encode()


async def _read_held(sandbox: Sandbox, command: int) -> tuple[Outcome, bytes, bytes]:
    """Of a command that has ended; all of it stays with the agent too, and so can be read again."""
    process = await sandbox.attach(command, hold=True)
    stdout, stderr = HeadTail(), HeadTail()
    await asyncio.gather(read_into(process.stdout, stdout), read_into(process.stderr, stderr))
    return await process.wait(), stdout.take(), stderr.take()


async def _read_so_far(sandbox: Sandbox, info: CommandInfo) -> tuple[bytes, bytes]:
    """Of a command that runs, as far as it had come when `info` was asked for. All of it stays with the agent."""
    process = await sandbox.attach(info.id, hold=True)
    try:
        return (
            await _read_up_to(process.stdout, info.stdout_bytes),
            await _read_up_to(process.stderr, info.stderr_bytes),
        )
    finally:
        await process.detach()


async def _read_up_to(reader: ByteReader, end: int) -> bytes:
    output = HeadTail()
    while reader.position < end and (content := await reader.read()):
        output.feed(content[: len(content) - max(0, reader.position - end)])
    return output.take()


async def _read_stubbornly(sandbox: Sandbox, command: int) -> tuple[Outcome, bytes, bytes]:
    """Over another connection when one breaks; a link that is gone for good says so at the next attempt."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _read_held(sandbox, command)
        except LinkLost:
            continue
    return await _read_held(sandbox, command)


async def put_away(sandbox: Sandbox, command: int) -> Outcome | None:
    """Ends a command that nobody will ask for; the agent forgets it."""
    try:
        process = await sandbox.attach(command)
        process.discard()
        await process.end(GRACE)
        return await process.wait()
    except LinkError as error:
        warn("not_put_away", command=f"{command:016x}", cause=error)
        return None
