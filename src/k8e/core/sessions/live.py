"""A session as the daemon holds it while it lives, and the list of them with who may see which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from k8e.core.access.access import Payer, find_payer, may_see
from k8e.core.clock import Clock
from k8e.core.egress.denials import Mark, Notes
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, Phase, Session
from k8e.core.sessions.phases import Event, follow
from k8e.core.store.records import SessionRecord
from k8e.policy import HostList

REMEMBERED = 1000  # ends of sessions of one payer, for a better answer than "never heard of it"
REMEMBERED_IN_ALL = 5000

GONE_HINT = "Create a new session; what was in the old one is gone."

Name = tuple[int, str, str]  # owner, tenant, session id


class Gone(Exception):
    """The session ended under whoever used it."""


class Live:
    def __init__(
        self,
        record: SessionRecord,
        clock: Clock,
        env: tuple[tuple[bytes, bytes], ...] = (),
        parent: Live | None = None,
    ) -> None:
        self.record = record
        self.parent = parent
        self.children: list[Live] = []  # those that are not gone
        self.last_used = record.session.last_used  # here and not in the record, which would be made anew at every use
        self.used_at = record.used_at
        self.env = env
        self.uses = 0  # in flight
        self.oom_kills = 0  # the last number heard
        self.oom_at: float | None = None  # when it was heard first, on the monotonic clock
        self.doubted: asyncio.Task[None] | None = None  # asks a sandbox that did not answer in time once more
        self.unsaved = False  # the last use is not in the store yet
        self.background: set[str] = set()  # ids of runs that were not seen to end
        self.collecting = asyncio.Lock()
        self.changing_hosts = asyncio.Lock()
        self.hosts_unsaved = False  # the list in force is not the one on record
        self.refusals = Notes()
        self.observing = asyncio.Lock()  # while the engine is asked for refusals
        self.marks: dict[str, Mark] = {}  # where background runs began, by their ids
        self.building: asyncio.Task[None] | None = None
        self.moving: asyncio.Task[None] | None = None  # from running to stopped, or back
        self.ending: asyncio.Task[None] | None = None
        self.stored = False
        self.ended_by = ""  # nobody: by itself
        # Done when the sandbox is, or is about to be, no more.
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        self._clock = clock

    @property
    def sandbox(self) -> str:
        return self.record.sandbox

    @property
    def session(self) -> Session:
        """As it is on record; `show` has what is known only here."""
        return self.record.session

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def phase(self) -> Phase:
        return self.session.phase

    @property
    def usable(self) -> bool:
        """Whether commands can run in it."""
        return self.phase is Phase.ACTIVE

    @property
    def stopped(self) -> bool:
        return self.phase is Phase.STOPPED

    @property
    def identity(self) -> dict[str, object]:
        """For the audit log."""
        session = self.session
        return {
            "session": session.session_id,
            "sandbox": self.sandbox,
            "owner": session.owner,
            "tenant": session.tenant,
        }

    @property
    def name(self) -> Name:
        return self.session.owner, self.session.tenant, self.session.session_id

    @property
    def payer(self) -> Payer:
        return find_payer(self.session.owner, self.session.tenant)

    def show(self) -> Session:
        children = tuple(child.session_id for child in self.children)
        return replace(self.session, last_used=self.last_used, children=children)

    def advance(self, event: Event, reason: str = "") -> None:
        """The only writer of the phase. What is begun again keeps its first reason; what is active has none."""
        phase = follow(self.phase, event)
        if phase is self.phase or not reason:
            reason = self.record.reason or reason
        session = replace(self.session, phase=phase)
        self.record = replace(self.record, session=session, reason="" if phase is Phase.ACTIVE else reason)

    def set_hosts(self, hosts: HostList) -> None:
        """The list that is in force from now on."""
        self.record = replace(self.record, session=replace(self.session, hosts=hosts))

    def part(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(Gone(reason))

    def revive(
        self, env: tuple[tuple[bytes, bytes], ...], env_keys: tuple[str, ...], secret_keys: tuple[str, ...]
    ) -> None:
        """It runs again, and nothing of what ran before: whoever waited for that has been told."""
        self.record = replace(self.record, session=replace(self.session, env_keys=env_keys, secret_keys=secret_keys))
        self.advance(Event.STARTED)
        self.env = env
        self.oom_kills, self.oom_at = 0, None
        self.background.clear()
        self.marks.clear()
        self.gone = asyncio.get_running_loop().create_future()
        self.touch()

    # Idleness

    def touch(self) -> None:
        self.last_used = self._clock.wall()
        self.used_at = self._clock.monotonic()
        self.unsaved = True
        if self.parent is not None:
            self.parent.touch()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.uses += 1
        self.touch()
        try:
            yield
        finally:
            self.uses -= 1
            self.touch()

    @property
    def busy(self) -> bool:
        """Whether something goes on in it, or in a child of it."""
        making = self.parent is not None and self.phase is Phase.CREATING
        return bool(self.uses or self.background) or making or any(child.busy for child in self.children)

    @property
    def expired(self) -> bool:
        if self.session.persistent:
            return False
        idle = self._clock.monotonic() - self.used_at
        return self.usable and not self.busy and idle >= self.session.ttl


class Registry:
    """All sessions that are not gone. What somebody may not see is answered as if it were not there."""

    def __init__(self) -> None:
        self._by_sandbox: dict[str, Live] = {}
        self._by_id: dict[str, dict[Name, Live]] = {}
        self._ended: dict[Payer, dict[Name, str]] = {}  # why; the latest last. By payer: none pushes out another's

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._by_sandbox.values()))

    def __len__(self) -> int:
        return len(self._by_sandbox)

    def check_name(self, live: Live) -> None:
        """Whether nobody has it."""
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
        if mine is not None and caller.meant.covers(mine.session.owner, mine.session.tenant):
            return mine
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
        """Says why it is gone to whom it would have been shown."""
        ends = (end for ended in self._ended.values() for end in ended.items())
        reasons = [why for name, why in ends if name[2] == session_id and may_see(caller, *name[:2])]
        if reasons:
            error, hint = f"there is no session {session_id} any more", GONE_HINT
        else:
            error, hint = f"there is no session {session_id}", "List your sessions, or create one."
        return Fault(Kind.NOT_FOUND, "session_not_found", error, detail=reasons[-1] if reasons else "", hint=hint)

    def visible(self, caller: Caller) -> list[Live]:
        return [live for live in self if may_see(caller, live.session.owner, live.session.tenant)]


def _describe_owner(live: Live) -> str:
    session = live.session
    whose = "the gateway's" if session.owner == REMOTE else f"uid {session.owner}'s"
    return f"{whose} in tenant {session.tenant}"
