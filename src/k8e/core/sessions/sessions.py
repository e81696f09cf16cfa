"""The life of a session: found, used, ended. Each phase is written down before the step it announces.

Building and ending are the service's own tasks. A caller that disappears in the middle changes nothing about how they
finish, and whoever comes second waits for the first instead of doing it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from k8e.core import checks
from k8e.core.egress.observer import Observer
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Caller, Phase, Session
from k8e.core.parts import Parts
from k8e.core.sessions.environments import Environments
from k8e.core.sessions.live import GONE_HINT, Live, Registry
from k8e.core.sessions.phases import Event
from k8e.core.tasks import stop, wait_done, wait_first, wait_result
from k8e.core.translation import translate, translated
from k8e.engine import EngineError, Observation, Place, RuntimeReport
from k8e.link.errors import AgentError, LinkError, LinkLost, LinkTimeout
from k8e.link.model import Sandbox

DESTROYED: Final = "destroyed"
EXPIRED: Final = "expired"
LOST: Final = "lost"
OUT_OF_MEMORY: Final = "out_of_memory"
UNRESPONSIVE: Final = "unresponsive"
NOT_ADOPTED: Final = "not_adopted"
STOPPED: Final = "stopped"
ABANDONED: Final = "abandoned"  # before it was ready; such a session leaves no record
FINISHED: Final = "finished"  # its one command has ended; nor does such a session
PARENT_ENDED: Final = "parent_ended"
UNBOUND: Final = "unbound"

SILENCE: Final = 30.0  # of a sandbox that was asked something, before it is ended
_LAST: Final = 3.0  # for its last answer: the daemon itself may have stood still for all of the time before
_PAUSE: Final = 0.5  # before one that could not be reached is asked again
_AFTERMATH: Final = 10.0  # from a kill for want of memory to the end of the sandbox that it explains
DEAD: Final = frozenset({LOST, OUT_OF_MEMORY, UNRESPONSIVE, NOT_ADOPTED})  # the sandbox ended; no caller asked for it

# Those that somebody can use, or have back.
_THERE: Final = frozenset({Phase.ACTIVE, Phase.STOPPING, Phase.STOPPED, Phase.STARTING})
# What somebody hears who comes too late.
_ENDS: Final = {
    DESTROYED: "it was destroyed",
    EXPIRED: "it expired: nobody used it for longer than its ttl",
    LOST: "its sandbox ended by itself",
    OUT_OF_MEMORY: "its sandbox ran out of memory, and the machine ended it",
    UNRESPONSIVE: f"its sandbox did not answer for {SILENCE:g} s and was ended: too many processes, or no CPU left",
    NOT_ADOPTED: "a new daemon could not take its sandbox over, for a reason that is in its log",
    STOPPED: "it was stopped",
    FINISHED: "it was there for one command, which has ended",
    PARENT_ENDED: "its parent ended or was stopped, and it with it",
    UNBOUND: "its list of hosts could not be narrowed with its parent's",
}
# Why a session cannot be used, and what to do, by its phase.
_GONE: Final = "is being destroyed", "Create a new session; what was in this one is gone."
_UNUSABLE: Final = {
    Phase.CREATING: ("is still being created", "Try again when the answer to its creation has come."),
    Phase.ACTIVE: ("was started again meanwhile", "Stop it again."),
    Phase.STARTING: ("is being started", "Try again when the answer to that has come."),
    Phase.STOPPING: ("is being stopped", "Its files are kept; start it again when it has stopped."),
    Phase.DESTROYING: _GONE,
    Phase.DESTROYED: _GONE,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that can be used, and the way into it."""

    live: Live
    sandbox: Sandbox
    place: Place


def describe_end(reason: str) -> str:
    return _ENDS.get(reason, reason)


def _describe_stopped(live: Live) -> Fault:
    return Fault(
        Kind.CONFLICT,
        "session_stopped",
        f"session {live.session_id} is stopped",
        detail=describe_end(live.record.reason),
        hint=f"Its files are kept. Start it: k8e sandbox start {live.session_id}",
    )


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Sessions:
    def __init__(self, parts: Parts, registry: Registry, observer: Observer, environments: Environments) -> None:
        self._parts = parts
        self._registry = registry
        self._observer = observer
        self._environments = environments

    # Asking

    async def get(self, caller: Caller, session_id: str) -> Session:
        live = self.find(caller, session_id)
        if live.usable:
            await self._observer.observe(live)
        return replace(live.show(), denied=live.refusals.recent(live.session_id))

    async def list(self, caller: Caller, *, all_phases: bool) -> Sequence[Session]:
        checks.check_caller(caller)
        living = [live.show() for live in self._registry.visible(caller)]
        if not all_phases:
            return [session for session in living if session.phase in _THERE]
        ended = await self._parts.store.ended_sessions(caller)
        return [*(record.session for record in ended), *living]

    def find(self, caller: Caller, session_id: str) -> Live:
        checks.check_caller(caller)
        return self._registry.find(caller, checks.check_name("session_id", session_id))

    async def open(self, caller: Caller, session_id: str) -> Opened:
        return await self.enter(self.find(caller, session_id))

    def check_active(self, live: Live) -> None:
        if not live.usable:
            raise self.describe_phase(live)

    def describe_phase(self, live: Live) -> Fault:
        """Why it cannot be used now."""
        if live.stopped:
            return _describe_stopped(live)
        what, hint = _UNUSABLE[live.phase]
        error = f"session {live.session_id} {what}"
        detail = describe_end(live.record.reason) if live.record.reason else ""
        return Fault(Kind.CONFLICT, f"session_{live.phase.value}", error, detail=detail, hint=hint)

    async def enter(self, live: Live) -> Opened:
        self.check_active(live)
        try:
            sandbox, place = await self._parts.engine.attach(live.sandbox)
        except (EngineError, LinkError) as error:
            await self.examine(live)
            if not live.usable:
                raise self.describe_loss(live) from error
            raise translate(error, "reaching the sandbox") from error
        return Opened(live, sandbox, place)

    async def examine(self, live: Live) -> Observation:
        """Observes a sandbox; the session of a dead one is ended, or stopped if it is to last."""
        seen = await self._observer.observe(live)
        if seen.oom_kills > live.oom_kills:
            live.oom_kills, live.oom_at = seen.oom_kills, self._parts.clock.monotonic()
        if not seen.alive and live.usable:
            warn("sandbox_died", session=live.session_id, sandbox=live.sandbox, oom_kills=seen.oom_kills)
            # One that memory took a command from may live on, and die of something else.
            lately = live.oom_at is not None and self._parts.clock.monotonic() - live.oom_at <= _AFTERMATH
            self.give_up(live, OUT_OF_MEMORY if lately else LOST)
        return seen

    def give_up(self, live: Live, reason: str) -> asyncio.Task[None]:
        """A session whose sandbox is dead, or as good as dead."""
        return self.halt(live, reason) if live.session.persistent else self.end(live, reason)

    def doubt(self, live: Live) -> None:
        """A sandbox did not answer in time: it is asked once more, and ended if it stays silent."""
        if live.usable and (live.doubted is None or live.doubted.done()):
            live.doubted = self._parts.tasks.spawn(self._ask(live))

    @contextmanager
    def using(self, live: Live, subject: str) -> Iterator[None]:
        """For whatever a caller asks of the agent: counts as a use, and a sandbox that does not answer is doubted."""
        with live.in_use(), translated(subject):
            try:
                yield
            except (LinkLost, LinkTimeout):
                self.doubt(live)
                raise

    async def _ask(self, live: Live) -> None:
        if await self._answers_within(live, SILENCE) or await self._answers_within(live, _LAST):
            return
        if live.usable and (await self.examine(live)).alive and live.usable:
            warn("sandbox_silent", session=live.session_id, sandbox=live.sandbox)
            self.give_up(live, UNRESPONSIVE)

    async def _answers_within(self, live: Live, seconds: float) -> bool:
        """Also true of a session that is not active any more."""
        try:
            async with asyncio.timeout(seconds):
                while live.usable and not await self._answers(live):  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            return False
        return True

    async def _answers(self, live: Live) -> bool:
        try:
            sandbox, _ = await self._parts.engine.attach(live.sandbox)
            await sandbox.commands()
        except AgentError:
            return True  # no is an answer
        except (LinkError, EngineError) as error:
            await self.examine(live)  # a dead one is ended at once
            # What the engine itself fails at says nothing of the sandbox.
            return isinstance(error, EngineError) and not isinstance(error.__cause__, LinkError)
        return True

    def describe_loss(self, live: Live) -> Fault:
        if live.phase in _THERE:
            return _describe_stopped(live)
        return Fault(
            Kind.NOT_FOUND,
            "session_not_found",
            f"there is no session {live.session_id} any more",
            detail=describe_end(live.record.reason),
            hint=GONE_HINT,
        )

    async def probe(self) -> Sequence[RuntimeReport]:
        with translated("trying the runtimes"):
            return await self._parts.engine.probe()

    # Stopping

    def halt(self, live: Live, reason: str, goodbye: Coroutine[Any, Any, None] | None = None) -> asyncio.Task[None]:
        """Begins to stop a session that lasts, once; `goodbye` is what comes before everything in it is killed."""
        if live.phase is not Phase.STOPPING or live.moving is None or _failed(live.moving):
            live.advance(Event.STOP_BEGUN, reason)
            if goodbye is None:
                live.part(describe_end(reason))
            live.moving = self._parts.tasks.spawn(self._halt(live, goodbye))
            self._end_children(live)
        elif goodbye is not None:
            goodbye.close()
        return live.moving

    async def _halt(self, live: Live, goodbye: Coroutine[Any, Any, None] | None) -> None:
        reason = live.record.reason
        try:
            await self._parts.store.set_phase(live.sandbox, Phase.STOPPING, reason, durable=True)
        except Fault as fault:
            # Goes on: a session that lasts, with a dead sandbox, is what the next daemon would find and stop.
            warn("phase_not_written", sandbox=live.sandbox, detail=fault.detail)
        if goodbye is not None:
            leaving = self._parts.tasks.spawn(goodbye)
            await wait_first(leaving, live.gone)
            await stop(leaving)
        live.part(describe_end(reason))
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

    async def destroy(self, caller: Caller, session_id: str) -> None:
        live = self.find(caller, session_id)
        if live.ending is not None:
            # Somebody else destroys it. When this answer is given it is gone, and they were the one who did it.
            await wait_done(live.ending)
            if not _failed(live.ending):
                raise self.describe_loss(live)
        live.ended_by = caller.label
        await wait_result(self.end(live, DESTROYED))

    def end(self, live: Live, reason: str) -> asyncio.Task[None]:
        """Begins to end a session, once; the first reason counts."""
        if live.ending is None or _failed(live.ending):
            self._let_go(live)
            live.advance(Event.END_BEGUN, ABANDONED if live.phase is Phase.CREATING else reason)
            live.part(describe_end(live.record.reason))
            live.ending = self._parts.tasks.spawn(self._end(live))
            self._end_children(live)
        return live.ending

    def _let_go(self, live: Live) -> None:
        """A start is given up. A stop goes on to its end, which comes at once: nobody waits for anything any more."""
        if live.phase is Phase.STARTING and live.moving is not None:
            live.moving.cancel()

    async def _end(self, live: Live) -> None:
        if live.building is not None and not live.building.done():
            await stop(live.building)
        if live.moving is not None:
            await wait_done(live.moving)
        try:
            await self._parts.store.set_phase(live.sandbox, Phase.DESTROYING, live.record.reason)
        except Fault as fault:
            # Goes on: a full disk must not keep anybody from destroying. An active session whose sandbox is
            # gone is what the next daemon would find, and knows to clear up.
            warn("phase_not_written", sandbox=live.sandbox, detail=fault.detail)
        if live.record.reason not in (ABANDONED, FINISHED):
            await self._observer.observe(live)  # for the last time
        await self._wait_for_children(live)
        with translated("destroying the sandbox"):
            await self._parts.engine.destroy(live.sandbox)
        if live.session.persistent:
            await self._environments.forget(live.sandbox)
        reason = live.record.reason
        if reason == ABANDONED or live.record.fleeting:
            await self._parts.store.forget_session(live.sandbox)
        else:
            await self._parts.store.end_session(
                live.sandbox, reason, self._parts.clock.wall(), keep_runs=reason in DEAD
            )
            self._registry.remember_end(live.name, describe_end(reason))
        live.advance(Event.ENDED)
        self._registry.remove(live)
        self._parts.metrics.destroys.add(reason)
        self._parts.metrics.sessions.value = len(self._registry)
        note("session_ended", session=live.session_id, sandbox=live.sandbox, reason=reason)
        self._parts.audit.note("session_ended", **live.identity, caller=live.ended_by, reason=reason)

    def _end_children(self, live: Live) -> None:
        for child in live.children:
            child.ended_by = live.ended_by
            self.end(child, PARENT_ENDED)

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
        """Ends the sessions that nobody has used for longer than their ttl; returns their ids."""
        expired = [live for live in self._registry if live.expired]
        for live in expired:
            self.end(live, EXPIRED)
        await asyncio.gather(*(live.ending for live in expired if live.ending), return_exceptions=True)
        return [live.session_id for live in expired]

    def resume_ends(self) -> None:
        """Tries again to end what could not be ended, and to stop what could not be stopped."""
        for live in self._registry:
            if live.phase is Phase.STOPPING and live.moving is not None and _failed(live.moving):
                self.halt(live, live.record.reason)
            if live.ending is not None and _failed(live.ending):
                self.end(live, live.record.reason)

    async def save_uses(self) -> None:
        unsaved = [live for live in self._registry if live.unsaved and live.stored]
        for live in unsaved:
            live.unsaved = False
        if unsaved:
            await self._parts.store.set_used((live.sandbox, live.last_used, live.used_at) for live in unsaved)
