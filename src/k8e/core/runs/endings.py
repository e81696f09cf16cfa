"""Puts on record how runs end: with an outcome, out of time, out of memory, or lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from k8e.core.egress.denials import Mark
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import OUTPUT_LIMIT, Phase, RunResult, Status
from k8e.core.parts import Parts
from k8e.core.sessions.ends import OUT_OF_MEMORY, SILENCE, describe_end
from k8e.core.sessions.live import Gone, Live
from k8e.core.sessions.sessions import Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_first
from k8e.core.translation import translate
from k8e.link.errors import LinkError
from k8e.link.model import Cause, Outcome, Sandbox

TIMEOUT_CODE: Final = 124
SIGNAL_BASE: Final = 128
OOM_CODE: Final = SIGNAL_BASE + signal.SIGKILL
GRACE: Final = 2.0  # between TERM and KILL
# The caller has its answer within the timeout and a second. So a command that timed out has less grace, and what the
# sandbox has not said by then is not waited for.
TIMEOUT_GRACE: Final = 0.4
ALLOWANCE: Final = 0.75
LOOK: Final = 0.05
DAEMON_STOPPED: Final = "the daemon was stopped, and ends foreground runs with itself"
DAEMON_DIED: Final = "the daemon that ran it ended without stopping, and its caller's connection with it"
# Of a command that timed out, by whether it began.
_KNOWN: Final = {None: "whether it began is not known", False: "nothing was run", True: "how it ended is not known"}


class Endings:
    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions
        self._settled: dict[str, RunRecord] = {}  # timed out; the sandbox may still say something about them
        self._closing = False

    def begin_close(self) -> None:
        """The daemon is about to stop: from now on it ends foreground runs, and their results say so."""
        self._closing = True

    async def judge(
        self,
        live: Live,
        record: RunRecord,
        outcome: Outcome,
        *,
        alone: bool,
        stdout: int = OUTPUT_LIMIT,
        stderr: int = OUTPUT_LIMIT,
    ) -> RunRecord:
        """The record of a run with an outcome; `alone`: no other command ran beside it."""
        kills = (await self._sessions.examine(live)).oom_kills - record.oom_before
        oom = suspect_oom(outcome.exit_code, outcome.signal, kills=kills, alone=alone)
        finished = self._parts.clock.wall()
        return record_outcome(record, outcome, oom=oom, stdout=stdout, stderr=stderr, finished=finished)

    async def finish(self, live: Live, record: RunRecord, mark: Mark, outcome: Outcome) -> RunResult:
        """A foreground run has an outcome."""
        ended = await self.judge(live, record, outcome, alone=live.alone)
        self._parts.metrics.exec_seconds.observe(outcome.wall_seconds)
        # The list of a one-command session cannot be changed any more: the next one can ask for another.
        denied = live.refusals.since(mark, "" if live.record.fleeting else live.session_id)
        if reason := self._explain(live, ended, outcome):
            ended = replace(ended, reason=reason)
        result = self._put(ended, live)
        return replace(result, denied=denied) if denied.entries or denied.more else result

    def _explain(self, live: Live, ended: RunRecord, outcome: Outcome) -> str:
        """Why a run was ended, where neither the command nor its caller did it."""
        if ended.status is not Status.KILLED:
            return ""
        if live.phase is Phase.STOPPING:
            return describe_end(live.record.reason)
        return DAEMON_STOPPED if self._closing and outcome.cause is Cause.ENDED else ""

    async def conclude(self, live: Live, record: RunRecord, error: Exception) -> RunResult:
        """A foreground run has no outcome. It is lost, unless the whole sandbox is known to have run out of memory."""
        if not isinstance(error, Gone):
            await self._sessions.examine(live)
            if live.gone.done():
                error = live.gone.result()  # which is why the link broke
            else:
                self._sessions.doubt(live)
        if live.record.reason == OUT_OF_MEMORY and live.memory_kills.count > record.oom_before:
            reason = _describe_loss(live)
            return self._put(replace(record, status=Status.OOM_KILLED, exit_code=OOM_CODE, reason=reason), live)
        self._put(replace(record, status=Status.LOST), live)
        if not isinstance(error, Gone):
            fault = translate(error, "the command")
            fault.run_id = record.run_id
            raise fault from error
        if live.session.persistent and live.phase is not Phase.DESTROYING:
            raise Fault(
                Kind.LOST,
                "session_stopped",
                "the session was stopped while the command ran",
                detail=str(error),
                hint=f"Look at what the command had done: k8e sandbox start {live.session_id}",
                run_id=record.run_id,
            ) from error
        raise Fault(
            Kind.LOST,
            "session_ended",
            "the session ended while the command ran",
            detail=str(error),
            hint="Create a new session; look at what the command had done before you run it again.",
            run_id=record.run_id,
        ) from error

    def time_out(self, live: Live, record: RunRecord, *, began: bool | None = None) -> RunResult:
        """The sandbox did not say in time how the command ended, or that it began. The caller hears that now; the
        sandbox is asked once more, and its session is ended if it stays silent."""
        self._sessions.doubt(live)
        reason = f"the sandbox did not answer in time: {_KNOWN[began]}"
        record = replace(record, status=Status.TIMED_OUT, exit_code=TIMEOUT_CODE, reason=reason)
        shown = self._put(record, live)
        if began is not False:
            self._settled[record.run_id] = replace(record, finished=self._parts.clock.wall())
        return shown

    def come_late(self, live: Live, record: RunRecord) -> RunResult:
        """The time of the run was over before the sandbox was asked to start it."""
        reason = f"the daemon could not start it in time: {_KNOWN[False]}"
        record = replace(record, status=Status.TIMED_OUT, exit_code=TIMEOUT_CODE, reason=reason)
        return self._put(self.measure(record), live)

    def withdraw(self, record: RunRecord) -> None:
        """Nothing ran, and nothing stays on record, unless the caller was told of a run that timed out."""
        if (settled := self._settled.get(record.run_id)) is None:
            self._parts.store.forget_run(record.run_id)
        else:
            self._parts.store.finish_run(settled)

    def measure(self, record: RunRecord) -> RunRecord:
        """The record of a run without an outcome, with the time since it was started."""
        return replace(record, duration_ms=max(0, round((self._parts.clock.wall() - record.started) * 1000)))

    def forget(self, record: RunRecord) -> None:
        """The sandbox will say nothing more about the run."""
        self._settled.pop(record.run_id, None)

    def _put(self, record: RunRecord, live: Live) -> RunResult:
        """The caller has the result, whatever becomes of the record."""
        if (settled := self._settled.pop(record.run_id, None)) is not None:
            record = settled  # as the caller was told
        else:
            record = self._close(record, live)
        try:
            self._parts.store.finish_run(record)
        except Fault as fault:
            warn("run_not_recorded", run=record.run_id, code=fault.code, detail=fault.detail)
        return record.show(live.session_id)

    def keep(self, record: RunRecord, live: Live) -> RunResult:
        """The same for runs whose caller does not wait. Raises Fault where it cannot be put on record."""
        record = self._close(record, live)
        self._parts.store.finish_run(record)
        return record.show(live.session_id)

    def _close(self, record: RunRecord, live: Live) -> RunRecord:
        status = record.status.value
        self._parts.metrics.execs.add(status)
        self._parts.audit.note(
            "run_ended",
            run=record.run_id,
            session=live.session_id,
            sandbox=record.sandbox,
            status=status,
            exit_code=record.exit_code,
            duration_ms=record.duration_ms,
        )
        note("run_ended", run=record.run_id, sandbox=record.sandbox, status=status, exit_code=record.exit_code)
        return record if record.finished is not None else replace(record, finished=self._parts.clock.wall())


def record_outcome(
    record: RunRecord,
    outcome: Outcome,
    *,
    oom: bool = False,
    stdout: int = OUTPUT_LIMIT,
    stderr: int = OUTPUT_LIMIT,
    finished: float | None = None,
) -> RunRecord:
    """`oom` is what `suspect_oom` found; `stdout` and `stderr` are how many bytes of each stream are kept at most."""
    status, code = judge(outcome.exit_code, outcome.signal, outcome.cause, oom=oom)
    return replace(
        record,
        finished=finished,
        status=status,
        exit_code=code,
        stdout_bytes=outcome.stdout_bytes,
        stderr_bytes=outcome.stderr_bytes,
        truncated=outcome.stdout_bytes > stdout or outcome.stderr_bytes > stderr,
        duration_ms=round(outcome.wall_seconds * 1000),
    )


def judge(exit_code: int | None, number: int | None, cause: Cause | None, *, oom: bool) -> tuple[Status, int | None]:
    """Status and exit code. `number` is the signal that the command died of.

    A time limit comes first, whatever else happened on the way out. Killed: by an order of the caller, or by a signal.
    """
    code = SIGNAL_BASE + number if number is not None else exit_code
    if code is None:
        return Status.LOST, None
    if cause is Cause.TIMEOUT:
        return Status.TIMED_OUT, TIMEOUT_CODE
    if oom:
        return Status.OOM_KILLED, code
    if cause is Cause.ENDED or number is not None:
        return Status.KILLED, code
    return Status.COMPLETED, code


def suspect_oom(exit_code: int | None, number: int | None, *, kills: int, alone: bool) -> bool:
    """Whether the kernel's out-of-memory kills, counted during a run, explain how it ended.

    The count is the sandbox's, not the command's. So it explains a SIGKILL (a shell says 137), and any failure of a
    command that ran alone. Of two commands at once, one that failed for its own reasons must not be blamed on memory.
    """
    if kills <= 0:
        return False
    if number == signal.SIGKILL or exit_code == OOM_CODE:
        return True
    return alone and exit_code != 0


def _describe_loss(live: Live) -> str:
    kept = "its files are kept" if live.session.persistent else "its files are gone"
    return f"{describe_end(live.record.reason)}: {kept}"


async def end_command(sandbox: Sandbox, command: int, *, running: bool = True) -> Outcome:
    """Ends a command whose output no caller will ask for; the agent forgets it."""
    process = await sandbox.attach(command)
    process.discard()
    if running:
        await process.end(GRACE)
    return await process.wait()


async def put_away(sandbox: Sandbox, command: int) -> Outcome | None:
    """The same; without an outcome where the sandbox does not answer."""
    try:
        return await end_command(sandbox, command)
    except LinkError as error:
        warn("not_put_away", command=f"{command:016x}", cause=error)
        return None


async def wait_until(futures: Collection[asyncio.Future[Any]], due: float) -> None:
    """Returns when one of them is done, or a moment after `due`, in the loop's time. The moment is longer when the
    daemon itself comes late: what arrived while it stood still is read before the run is judged."""
    loop = asyncio.get_running_loop()
    if not await wait_first(*futures, timeout=due - loop.time()):
        await wait_first(*futures, timeout=max(LOOK, min(loop.time() - due, ALLOWANCE)))


def describe_silence(subject: str) -> Fault:
    hint = f"It may or may not have happened. A sandbox that stays silent for {SILENCE:g} s is ended."
    return Fault(Kind.LOST, "sandbox_unreachable", f"{subject}: the sandbox did not answer in time", hint=hint)
