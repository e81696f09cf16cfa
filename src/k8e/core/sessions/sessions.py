"""The sessions that are not destroyed: callers find, enter and use them; their sandboxes are observed.

Each sandbox is observed before and after every command, so an engine answers at once when there is nothing to tell. The
upkeep observes sessions in which no command runs in turn, and each session is observed once more before its end. A
silent sandbox is asked once more before its session is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from k8e.core import checks
from k8e.core.access.access import Payer, find_payer, may_see
from k8e.core.egress.denials import clean
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import warn
from k8e.core.model import REMOTE, Caller
from k8e.core.parts import Parts
from k8e.core.sessions import ends
from k8e.core.sessions.live import Live, Name
from k8e.core.tasks import do_in_turn
from k8e.core.translation import translate, translated
from k8e.engine import EngineError, Observation, Place
from k8e.link.errors import AgentError, LinkError, LinkLost, LinkTimeout
from k8e.link.model import Sandbox

REMEMBERED: Final = 1000  # ends of sessions of one payer, for a better answer than "never heard of it"
REMEMBERED_IN_ALL: Final = 5000
_ROUND: Final = 32  # sessions observed in one round of upkeep
AT_ONCE: Final = 4  # by the upkeep, before requests have their turn
_LAST: Final = 3.0  # for its last answer: the daemon itself may have stood still for all of the time before
_PAUSE: Final = 0.5  # before one that could not be reached is asked again


class Registry:
    """Answers a caller who may not see a session as if it did not exist."""

    def __init__(self) -> None:
        self._by_sandbox: dict[str, Live] = {}
        self._by_id: dict[str, dict[Name, Live]] = {}
        self._ended: dict[Payer, dict[Name, str]] = {}  # why; the latest last. By payer: none pushes out another's

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._by_sandbox.values()))

    def __len__(self) -> int:
        return len(self._by_sandbox)

    def check_name(self, live: Live) -> None:
        """Refuses a name that another session of the same owner and tenant has."""
        namesake = self._by_id.get(live.session_id, {}).get(live.name)
        if namesake is not None:
            raise Fault(
                Kind.CONFLICT,
                "session_exists",
                f"session {live.session_id} exists already",
                detail=f"it is {namesake.phase.value}",
                hint="Use it, destroy it first, or choose another id.",
            )

    def add(self, live: Live) -> None:
        self.check_name(live)
        self._by_id.setdefault(live.session_id, {})[live.name] = live
        self._by_sandbox[live.sandbox] = live
        if live.parent is not None:
            live.parent.children.append(live)
        self._forget_end(live.name)

    def remove(self, live: Live) -> None:
        del self._by_sandbox[live.sandbox]
        if live.parent is not None:
            live.parent.children.remove(live)
        namesakes = self._by_id[live.session_id]
        del namesakes[live.name]
        if not namesakes:
            del self._by_id[live.session_id]

    def remember_end(self, name: Name, reason: str) -> None:
        self._forget_end(name)
        ended = self._ended.setdefault(find_payer(*name[:2]), {})
        ended[name] = reason
        if len(ended) > REMEMBERED:
            self._forget_end(next(iter(ended)))
        elif sum(map(len, self._ended.values())) > REMEMBERED_IN_ALL:
            most = max(self._ended.values(), key=len)
            self._forget_end(next(iter(most)))

    def _forget_end(self, name: Name) -> None:
        payer = find_payer(*name[:2])
        ended = self._ended.get(payer, {})
        ended.pop(name, None)
        if not ended:
            self._ended.pop(payer, None)

    def find(self, caller: Caller, session_id: str) -> Live:
        namesakes = self._by_id.get(session_id, {})
        mine = namesakes.get((caller.uid, caller.tenant or "default", session_id))
        if mine is not None and not caller.tenants and caller.meant.covers(mine.session.owner, mine.session.tenant):
            return mine  # a caller with several tenants has none that comes before the others
        seen = [live for live in namesakes.values() if may_see(caller, live.session.owner, live.session.tenant)]
        if not seen:
            raise self.missing(caller, session_id)
        if len(seen) > 1:
            raise Fault(
                Kind.CONFLICT,
                "session_ambiguous",
                f"there are {len(seen)} sessions called {session_id}",
                detail="; ".join(sorted(_describe_owner(live) for live in seen)),
                hint="Say whose you mean: --tenant-id NAME and --owner UID, or --owner gateway (tenant_id, owner).",
            )
        return seen[0]

    def get(self, sandbox: str) -> Live | None:
        """For what belongs to a sandbox and was already shown to be the caller's."""
        return self._by_sandbox.get(sandbox)

    def find_sandbox(self, caller: Caller, sandbox: str) -> Live | None:
        live = self._by_sandbox.get(sandbox)
        return live if live and may_see(caller, live.session.owner, live.session.tenant) else None

    def missing(self, caller: Caller, session_id: str) -> Fault:
        """Tells a caller who could have seen the session why it is gone."""
        all_ends = (end for ended in self._ended.values() for end in ended.items())
        reasons = [why for name, why in all_ends if name[2] == session_id and may_see(caller, *name[:2])]
        if reasons:
            error, hint = f"there is no session {session_id} any more", ends.GONE_HINT
        else:
            error, hint = f"there is no session {session_id}", "List your sessions, or create one."
        return Fault(Kind.NOT_FOUND, "session_not_found", error, detail=reasons[-1] if reasons else "", hint=hint)

    def visible(self, caller: Caller) -> list[Live]:
        return [live for live in self if may_see(caller, live.session.owner, live.session.tenant)]


def _describe_owner(live: Live) -> str:
    session = live.session
    whose = "the gateway's" if session.owner == REMOTE else f"uid {session.owner}'s"
    return f"{whose} in tenant {session.tenant}"


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
            return seen

    async def observe_some(self, lives: Sequence[Live]) -> None:
        """Some of the sessions now, the others in the next rounds."""
        active = sorted((live for live in lives if live.usable), key=lambda live: live.sandbox)
        turn = [live for live in active if live.sandbox > self._asked][:_ROUND]
        await do_in_turn(self.observe, turn, AT_ONCE)
        self._asked = turn[-1].sandbox if len(turn) == _ROUND else ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that can be used, and the way into it."""

    live: Live
    sandbox: Sandbox
    place: Place


class Sessions:
    def __init__(
        self, parts: Parts, registry: Registry, observer: Observer, give_up: Callable[[Live, str], object]
    ) -> None:
        """`give_up` ends a session, or stops a persistent one, whose sandbox is dead or silent."""
        self._parts = parts
        self._registry = registry
        self._observer = observer
        self._give_up = give_up
        self._doubted: dict[str, asyncio.Task[None]] = {}  # by sandbox: it did not answer in time and is asked again

    def find(self, caller: Caller, session_id: str) -> Live:
        checks.check_caller(caller)
        return self._registry.find(caller, checks.check_name("session_id", session_id))

    async def open(self, caller: Caller, session_id: str) -> Opened:
        return await self.enter(self.find(caller, session_id))

    async def enter(self, live: Live) -> Opened:
        if not live.usable:
            raise ends.describe_unusable(live)
        try:
            sandbox, place = await self._parts.engine.attach(live.sandbox)
        except (EngineError, LinkError) as error:
            await self.examine(live)
            if not live.usable:
                raise ends.describe_loss(live) from error
            raise translate(error, "reaching the sandbox") from error
        return Opened(live, sandbox, place)

    async def examine(self, live: Live) -> Observation:
        """Observes a sandbox; the session of a dead one is ended, or stopped if it is persistent."""
        seen = await self._observer.observe(live)
        live.memory_kills.see(seen.oom_kills)
        if not seen.alive and live.usable:
            warn("sandbox_died", session=live.session_id, sandbox=live.sandbox, oom_kills=seen.oom_kills)
            self._give_up(live, ends.OUT_OF_MEMORY if live.memory_kills.recent else ends.LOST)
        return seen

    def doubt(self, live: Live) -> None:
        """A sandbox did not answer in time: it is asked once more, and ended if it stays silent."""
        if live.usable and live.sandbox not in self._doubted:
            self._doubted[live.sandbox] = asking = self._parts.tasks.spawn(self._ask(live))
            asking.add_done_callback(lambda _: self._doubted.pop(live.sandbox))

    @contextmanager
    def using(self, live: Live, subject: str) -> Iterator[None]:
        """Around each request to the agent: it counts as a use, and a sandbox that does not answer is doubted."""
        with live.in_use(), translated(subject):
            try:
                yield
            except (LinkLost, LinkTimeout):
                self.doubt(live)
                raise

    async def _ask(self, live: Live) -> None:
        if await self._answers_within(live, ends.SILENCE) or await self._answers_within(live, _LAST):
            return
        if live.usable and (await self.examine(live)).alive and live.usable:
            warn("sandbox_silent", session=live.session_id, sandbox=live.sandbox)
            self._give_up(live, ends.UNRESPONSIVE)

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

    async def save_uses(self) -> None:
        """Writes down when sessions were last used."""
        stored = [live for live in self._registry if live.stored]
        uses = [(live.sandbox, *times) for live in stored if (times := live.use.take_unsaved())]
        if uses:
            await self._parts.store.set_used(uses)
