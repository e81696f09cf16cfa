"""Puts a run on record and starts its command, foreground and background alike.

A run is on record before its command starts, so that after a crash it is known as lost rather than unknown. No command
is started twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from k8e.core.egress.denials import Mark
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, RunSpec
from k8e.core.parts import Parts
from k8e.core.runs.endings import Endings
from k8e.core.sessions.ends import describe_loss
from k8e.core.sessions.live import Live
from k8e.core.sessions.quotas import Quotas
from k8e.core.sessions.sessions import Opened, Sessions
from k8e.core.store.records import RunRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translate
from k8e.link.errors import LinkError, NotStarted
from k8e.link.model import ExecSpec, Process

Facts = dict[str, object]

KEPT_RUNS: Final = 1000  # ended ones on record, of one session


@dataclass(frozen=True, slots=True, eq=False)
class Launcher:
    _parts: Parts
    _sessions: Sessions
    _quotas: Quotas
    _endings: Endings

    def count(self, live: Live) -> Callable[[], None]:
        """Counts one more run of the session's payer, until the returned function is called."""
        return self._quotas.take_run(live.payer)

    def describe(self, caller: Caller, spec: RunSpec) -> Facts:
        """For the audit log."""
        return {"caller": caller.label, **self._parts.audit.describe_run(spec)}

    def new_record(self, live: Live, *, background: bool) -> RunRecord:
        return RunRecord(
            run_id=f"run-{secrets.token_hex(8)}",
            sandbox=live.sandbox,
            background=background,
            started=self._parts.clock.wall(),
        )

    async def record(self, live: Live, record: RunRecord, about: Facts) -> tuple[RunRecord, Mark]:
        """Puts the run on record and into the audit log. Access denied after the mark was denied during the run."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        # Both at once, because every command waits for them.
        inserting = asyncio.ensure_future(self._parts.store.insert_run(record, KEPT_RUNS))
        try:
            before = await self._sessions.examine(live)
            mark = live.refusals.mark()
        finally:
            await wait_done(inserting)
        inserting.result()
        if not before.alive:
            await self._endings.withdraw(record)
            raise describe_loss(live)
        return replace(record, oom_before=before.oom_kills), mark

    async def record_unreachable(self, live: Live, record: RunRecord, about: Facts) -> None:
        """Puts a run on record whose sandbox cannot be reached."""
        await self._parts.audit.record("run_started", run=record.run_id, **live.identity, **about)
        await self._parts.store.insert_run(record, KEPT_RUNS)

    async def start(self, opened: Opened, record: RunRecord, spec: ExecSpec) -> Process:
        try:
            return await opened.sandbox.start(spec)
        except NotStarted as error:
            await self._endings.withdraw(record)
            raise translate(error, "the command") from error
        except ValueError as error:  # a length that only the link knows
            await self._endings.withdraw(record)
            raise Fault(Kind.INVALID, "invalid_argument", str(error), field="argv") from error
        except LinkError as error:
            await self._endings.conclude(opened.live, record, error)
            raise translate(error, "starting the command") from error
