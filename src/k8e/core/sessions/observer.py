"""Observes sandboxes through the engine, notes with their sessions what they were denied, and logs it.

Each is observed before and after every command, so an engine answers at once when there is nothing to tell. The upkeep
observes sessions in which no command runs in turn, and each session is observed once more before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from k8e.core.egress.denials import Mark, clean
from k8e.core.errors import Fault
from k8e.core.log.daemon_log import warn
from k8e.core.parts import Parts
from k8e.core.sessions.live import Live
from k8e.engine import EngineError, Observation, Refusal

_ROUND: Final = 32  # sessions asked in one round of upkeep


class Observer:
    def __init__(self, parts: Parts) -> None:
        self._engine = parts.engine
        self._metrics = parts.metrics
        self._refusals = parts.refusals
        self._asked = ""  # last by the upkeep

    async def observe(self, live: Live) -> Observation:
        """Never keeps a command from running: what the engine cannot tell is missing, and the daemon log says so."""
        async with live.observing:  # a second caller wants what happened until now, and asks again
            try:
                seen = await self._engine.observe(live.sandbox)
            except EngineError as error:
                warn("health_unknown", session=live.session_id, sandbox=live.sandbox, cause=error)
                return Observation(alive=True, oom_kills=0)
            if seen.refusals_unknown:
                warn("refusals_unknown", session=live.session_id, sandbox=live.sandbox, cause=seen.refusals_unknown)
            if seen.refusals:
                refusals = [clean(refusal) for refusal in seen.refusals]
                live.refusals.add(refusals)
                self._metrics.refusals.add(amount=len(refusals))
                self._log(live, refusals)
            return seen

    def _log(self, live: Live, refusals: Sequence[Refusal]) -> None:
        for each in refusals:
            self._refusals.note(
                "refused",
                live.sandbox,
                live.identity,
                host=each.host,
                address=each.address,
                port=each.port,
                reason=each.reason,
                refused_at=round(each.at, 3),
            )

    async def mark(self, live: Live) -> Mark:
        """Where a run begins: what is denied from now on is denied during the run."""
        await self.observe(live)
        return live.refusals.mark()

    async def explain(self, live: Live, mark: Mark, fault: Fault) -> Fault:
        """The fault of a session that could not be created, with the denials that may be its cause. Their hints name no
        session, because there is none."""
        await self.observe(live)
        denied = live.refusals.since(mark, "")
        if not denied.entries:
            return fault
        last = denied.entries[-1]
        named = last.host or last.address
        detail = f"the network was refused: {named} ({last.reason}); {fault.detail}"
        explained = Fault(
            fault.kind, fault.code, fault.error, detail=detail, hint=last.hint, field=fault.field, denied=denied
        )
        return explained.with_traceback(fault.__traceback__)

    async def observe_some(self, lives: Sequence[Live]) -> None:
        """Some of the sessions now, the others in the next rounds."""
        active = sorted((live for live in lives if live.usable), key=lambda live: live.sandbox)
        turn = [live for live in active if live.sandbox > self._asked][:_ROUND]
        for live in turn:
            await self.observe(live)
        self._asked = turn[-1].sandbox if len(turn) == _ROUND else ""
