"""How runs end: seen, lost or taken by memory. What is known is put on record."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.egress.denials import Mark
from k8e.core.errors import Fault, Kind
from k8e.core.log.journal import note
from k8e.core.model import OUTPUT_LIMIT, Phase, RunResult, Status
from k8e.core.parts import Parts
from k8e.core.runs.verdict import OOM_CODE, TIMEOUT_CODE, judge, suspect_oom
from k8e.core.sessions.live import Gone, Live
from k8e.core.sessions.sessions import OUT_OF_MEMORY, Sessions, describe_end
from k8e.core.store.records import RunRecord
from k8e.core.translation import translate
from k8e.link.model import Outcome

# Of a command that timed out, by whether it began.
_KNOWN: Final = {None: "whether it began is not known", False: "nothing was run", True: "how it ended is not known"}


class Endings:
    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions
        self._settled: dict[str, RunRecord] = {}  # that timed out, and of which the sandbox may still say something

    async def finish(self, live: Live, record: RunRecord, mark: Mark, outcome: Outcome) -> RunResult:
        """A command's end was seen."""
        kills = (await self._sessions.examine(live)).oom_kills - record.oom_before
        alone = live.uses <= 1 and not live.background
        oom = suspect_oom(outcome.exit_code, outcome.signal, kills=kills, alone=alone)
        status, code = judge(outcome.exit_code, outcome.signal, outcome.cause, oom=oom)
        ended = replace(
            record,
            status=status,
            exit_code=code,
            stdout_bytes=outcome.stdout_bytes,
            stderr_bytes=outcome.stderr_bytes,
            truncated=max(outcome.stdout_bytes, outcome.stderr_bytes) > OUTPUT_LIMIT,
            duration_ms=round(outcome.wall_seconds * 1000),
        )
        self._parts.metrics.exec_seconds.observe(outcome.wall_seconds)
        denied = live.refusals.since(mark, live.session_id)
        reason = describe_end(live.record.reason) if live.phase is Phase.STOPPING and status is Status.KILLED else ""
        return replace(self._put(ended, live), denied=denied, reason=reason)

    async def conclude(self, live: Live, record: RunRecord, error: Exception) -> RunResult:
        """It was not seen. Says so, unless it is known that memory ended the whole sandbox."""
        if not isinstance(error, Gone):
            await self._sessions.examine(live)
            if live.gone.done():
                error = live.gone.result()  # which is why the link broke
            else:
                self._sessions.doubt(live)
        if live.record.reason == OUT_OF_MEMORY and live.oom_kills > record.oom_before:
            ended = self._put(replace(record, status=Status.OOM_KILLED, exit_code=OOM_CODE), live)
            return replace(ended, reason=_describe_loss(live))
        self._put(replace(record, status=Status.LOST), live)
        if not isinstance(error, Gone):
            raise translate(error, "the command") from error
        if live.session.persistent and live.phase is not Phase.DESTROYING:
            raise Fault(
                Kind.LOST,
                "session_stopped",
                "the session was stopped while the command ran",
                detail=str(error),
                hint=f"Look at what the command had done: k8e sandbox start {live.session_id}",
            ) from error
        raise Fault(
            Kind.LOST,
            "session_ended",
            "the session ended while the command ran",
            detail=str(error),
            hint="Create a new session; look at what the command had done before you run it again.",
        ) from error

    def time_out(self, live: Live, record: RunRecord, *, began: bool | None = None) -> RunResult:
        """The sandbox did not say in time how it ended, or that it began. The caller hears that now; the sandbox is
        asked once more, and ended if it stays silent."""
        self._sessions.doubt(live)
        record = replace(record, status=Status.TIMED_OUT, exit_code=TIMEOUT_CODE)
        shown = self._put(record, live)
        if began is not False:
            self._settled[record.run_id] = replace(record, finished=self._parts.clock.wall())
        return replace(shown, reason=f"the sandbox did not answer in time: {_KNOWN[began]}")

    def come_late(self, live: Live, record: RunRecord) -> RunResult:
        """Its time was over before the sandbox was asked to start it."""
        record = replace(record, status=Status.TIMED_OUT, exit_code=TIMEOUT_CODE)
        shown = self._put(replace(record, duration_ms=self.since(record.started)), live)
        return replace(shown, reason=f"the daemon could not start it in time: {_KNOWN[False]}")

    async def withdraw(self, record: RunRecord) -> None:
        """Nothing ran, and nothing stays on record, unless the caller was told of a run that timed out."""
        if (settled := self._settled.get(record.run_id)) is None:
            await self._parts.store.forget_run(record.run_id)
        else:
            await self._parts.store.finish_run(settled)

    def since(self, started: float) -> int:
        return max(0, round((self._parts.clock.wall() - started) * 1000))

    def forget(self, record: RunRecord) -> None:
        """Nothing will be heard of it any more."""
        self._settled.pop(record.run_id, None)

    def _put(self, record: RunRecord, live: Live) -> RunResult:
        """Written in the background: who waited for the command has its result, whatever becomes of the record."""
        if (settled := self._settled.pop(record.run_id, None)) is not None:
            record = settled  # the caller was told, and that stands
        else:
            record = self._close(record, live)
        self._parts.tasks.spawn(self._parts.store.finish_run(record))
        return record.show(live.session_id)

    async def keep(self, record: RunRecord, live: Live) -> RunResult:
        """Returns when it is on record: for runs that nobody waits for."""
        record = self._close(record, live)
        await self._parts.store.finish_run(record)
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
        return replace(record, finished=self._parts.clock.wall())


def _describe_loss(live: Live) -> str:
    kept = "its files are kept" if live.session.persistent else "its files are gone"
    return f"{describe_end(live.record.reason)}: {kept}"
