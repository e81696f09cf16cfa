"""Stops and ends sessions. Each phase is written down before the step that it announces.

Building, stopping, starting and ending are the service's own tasks: a caller that leaves changes nothing about how they
finish, and a second caller waits for the first instead of doing it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Phase
from k8e.core.parts import Parts
from k8e.core.sessions import ends
from k8e.core.sessions.live import Live
from k8e.core.sessions.phases import Event
from k8e.core.sessions.sessions import Observer, Registry
from k8e.core.tasks import do_in_turn, stop, wait_done, wait_first, wait_result
from k8e.core.translation import translated

_EXPIRIES: Final = 4  # sessions that are ended at once because they expired: no caller waits for them


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Lifecycle:
    _parts: Parts
    _registry: Registry
    _observer: Observer

    def begin(self, live: Live, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins to build or to start a session; the caller hears of faults."""
        live.step = self._parts.tasks.spawn(work, watched=True)
        return live.step

    def give_up(self, live: Live, reason: str) -> asyncio.Task[None]:
        """Stops or ends a session whose sandbox is dead, or as good as dead."""
        return self.halt(live, reason) if live.session.persistent else self.end(live, reason)

    # Stopping

    def halt(
        self, live: Live, reason: str, goodbye: Coroutine[Any, Any, None] | None = None, by: str = ""
    ) -> asyncio.Task[None]:
        """Begins to stop a persistent session, once; `goodbye` is what comes before everything in it is killed."""
        if live.phase is not Phase.STOPPING or live.step is None or _failed(live.step):
            live.ended_by = by or live.ended_by
            live.advance(Event.STOP_BEGUN, reason)
            if goodbye is None:
                live.part(ends.describe_end(reason))
            live.step = self._parts.tasks.spawn(self._halt(live, goodbye))
            self._end_children(live)
        elif goodbye is not None:
            goodbye.close()
        return live.step

    async def _halt(self, live: Live, goodbye: Coroutine[Any, Any, None] | None) -> None:
        reason = live.record.reason
        try:
            await self._parts.store.set_phase(live.sandbox, Phase.STOPPING, reason, durable=True)
        except Fault as fault:
            # Goes on: a persistent session with a dead sandbox is what the next daemon would find and stop.
            warn("phase_not_written", sandbox=live.sandbox, detail=fault.detail)
        if goodbye is not None:
            leaving = self._parts.tasks.spawn(goodbye)
            await wait_first(leaving, live.gone)
            await stop(leaving)
        live.part(ends.describe_end(reason))
        await self._observer.observe(live)  # for the last time
        await self._wait_for_children(live)
        with translated("stopping the sandbox"):
            await self._parts.engine.stop(live.sandbox)
        if live.ending is None:
            await self._parts.store.stop_session(live.sandbox, reason, self._parts.clock.wall())
        if live.ending is None:
            live.advance(Event.STOPPED)
            live.background.clear()
            note("session_stopped", session=live.session_id, sandbox=live.sandbox, reason=reason)
            self._parts.audit.note("session_stopped", **live.identity, caller=live.ended_by, reason=reason)
            live.ended_by = ""

    # Ending

    async def destroy(self, live: Live, by: str) -> None:
        if live.ending is not None:
            # Another caller destroys it. When this answer is given it is gone, and that caller did it.
            await wait_done(live.ending)
            if not _failed(live.ending):
                raise ends.describe_loss(live)
        await wait_result(self.end(live, ends.DESTROYED, by))

    def end(self, live: Live, reason: str, by: str = "") -> asyncio.Task[None]:
        """Begins to end a session, once; the first reason counts."""
        if live.ending is None or _failed(live.ending):
            live.ended_by = by or live.ended_by
            if live.phase is Phase.STARTING and live.step is not None:
                live.step.cancel()  # a stop goes on to its end, which comes at once: nothing is waited for any more
            live.advance(Event.END_BEGUN, ends.ABANDONED if live.phase is Phase.CREATING else reason)
            live.part(ends.describe_end(live.record.reason))
            live.ending = self._parts.tasks.spawn(self._end(live))
            self._end_children(live)
        return live.ending

    async def _end(self, live: Live) -> None:
        if live.step is not None:
            await (stop if live.record.reason == ends.ABANDONED else wait_done)(live.step)
        try:
            await self._parts.store.set_phase(live.sandbox, Phase.DESTROYING, live.record.reason)
        except Fault as fault:
            # Goes on: a full disk must not keep a caller from destroying. An active session whose sandbox is
            # gone is what the next daemon would find, and knows to clear up.
            warn("phase_not_written", sandbox=live.sandbox, detail=fault.detail)
        if live.record.reason not in (ends.ABANDONED, ends.FINISHED):
            await self._observer.observe(live)  # for the last time
        await self._wait_for_children(live)
        with translated("destroying the sandbox"):
            await self._parts.engine.destroy(live.sandbox)
        if live.session.persistent:
            await self._parts.environments.forget(live.sandbox)
        reason = live.record.reason
        if reason == ends.ABANDONED or live.record.fleeting:
            await self._parts.store.forget_session(live.sandbox)
        else:
            await self._parts.store.end_session(
                live.sandbox, reason, self._parts.clock.wall(), keep_runs=reason in ends.DEAD
            )
            self._registry.remember_end(live.name, ends.describe_end(reason))
        live.advance(Event.ENDED)
        self._registry.remove(live)
        self._parts.metrics.destroys.add(reason)
        self._parts.metrics.sessions.value = len(self._registry)
        note("session_ended", session=live.session_id, sandbox=live.sandbox, reason=reason)
        self._parts.audit.note("session_ended", **live.identity, caller=live.ended_by, reason=reason)

    def _end_children(self, live: Live) -> None:
        for child in live.children:
            self.end(child, ends.PARENT_ENDED, live.ended_by)

    async def _wait_for_children(self, live: Live) -> None:
        """They are gone before their parent is, because what they share is the parent's."""
        endings = {child.session_id: child.ending for child in live.children if child.ending}
        await wait_done(*endings.values())
        for session_id, ending in endings.items():
            if _failed(ending):
                raise Fault(
                    Kind.FAILED,
                    "child_not_ended",
                    f"session {session_id}, a child of {live.session_id}, could not be ended",
                    detail="" if ending.cancelled() else str(ending.exception()),
                    hint="It is tried again.",
                )

    # Upkeep

    async def expire(self) -> Sequence[str]:
        """Ends the sessions that were not used for longer than their ttl; returns their ids."""
        expired = [live for live in self._registry if live.expired]
        await do_in_turn(self._expire, expired, _EXPIRIES)
        return [live.session_id for live in expired if live.ending is not None]

    async def _expire(self, live: Live) -> None:
        if live.expired:  # still: it was not used, nor ended with its parent, while others were
            await wait_done(self.end(live, ends.EXPIRED))
        elif live.ending is not None:
            await wait_done(live.ending)

    def resume_ends(self) -> None:
        """Tries again to end what could not be ended, and to stop what could not be stopped."""
        for live in self._registry:
            if live.phase is Phase.STOPPING and live.step is not None and _failed(live.step):
                self.halt(live, live.record.reason)
            if live.ending is not None and _failed(live.ending):
                self.end(live, live.record.reason)
