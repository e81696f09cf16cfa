"""A session as the daemon holds it while it lives. Each part of its state has one writer."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Final

from k8e.core.access.access import find_payer
from k8e.core.clock import Clock
from k8e.core.egress.denials import Mark, Notes
from k8e.core.model import Phase, Session
from k8e.core.sandbox.environment import Variables
from k8e.core.sessions.phases import Event, follow
from k8e.core.store.records import SessionRecord
from k8e.policy import HostList

Name = tuple[int, str, str]  # owner, tenant, session id

_AFTERMATH: Final = 10.0  # seconds from a kill for want of memory to the end of the sandbox that it explains
_THERE: Final = frozenset({Phase.ACTIVE, Phase.STOPPING, Phase.STOPPED, Phase.STARTING})


class Gone(Exception):
    """The session ended while a caller used it."""


class Use:
    """Counts uses, and remembers the last one; not in the record, which would be made anew each time."""

    def __init__(self, clock: Clock, last_used: float, used_at: float) -> None:
        self._clock = clock
        self._unsaved = False
        self.last_used = last_used  # wall clock
        self.used_at = used_at  # monotonic clock
        self.count = 0

    def touch(self) -> None:
        self.last_used, self.used_at, self._unsaved = self._clock.wall(), self._clock.monotonic(), True

    @property
    def idle(self) -> float:
        return self._clock.monotonic() - self.used_at

    def take_unsaved(self) -> tuple[float, float] | None:
        """The last use on both clocks, if the store does not have it yet."""
        unsaved, self._unsaved = self._unsaved, False
        return (self.last_used, self.used_at) if unsaved else None


class MemoryKills:
    """The kernel's out-of-memory kills in the sandbox, as far as they were observed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at: float | None = None  # when the count was last seen to rise
        self.count = 0

    def see(self, count: int) -> None:
        if count > self.count:
            self.count, self._at = count, self._clock.monotonic()

    @property
    def recent(self) -> bool:
        """Whether one explains the death of the sandbox now: it may live on after a kill, and die of something else."""
        return self._at is not None and self._clock.monotonic() - self._at <= _AFTERMATH


class BackgroundRuns:
    """The background runs that were not seen to end, by id, and where each began among the session's refusals."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._terminals: set[str] = set()
        self.collecting = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def busy(self) -> bool:
        """Whether one runs that its session waits for. A terminal is waited for only while a client is at it, which is
        a use of its own: a shell that a person has forgotten would keep its session for ever."""
        return len(self._marks) > len(self._terminals)

    def add(self, run_id: str, mark: Mark | None = None, *, terminal: bool = False) -> None:
        """Without a mark an earlier daemon started it, and it was under way for all that this one has seen."""
        self._marks[run_id] = mark or Mark()
        if terminal:
            self._terminals.add(run_id)

    def discard(self, run_id: str) -> None:
        self._marks.pop(run_id, None)
        self._terminals.discard(run_id)

    def clear(self) -> None:
        self._marks.clear()
        self._terminals.clear()

    def find_mark(self, run_id: str) -> Mark:
        return self._marks.get(run_id) or Mark()


@dataclass(slots=True)
class HostsState:
    """The session's list of hosts between its record and the kernel; hosts.py writes it."""

    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    unsaved: bool = False  # the list in force is not the one on record


class InUse(AbstractContextManager[None]):
    """A use of a session: every command is two, and a generator would cost each three times as much."""

    __slots__ = ("_live",)

    def __init__(self, live: Live) -> None:
        self._live = live

    def __enter__(self) -> None:
        self._live.begin_use()

    def __exit__(self, *_: object) -> None:
        self._live.end_use()


class Live:
    def __init__(
        self,
        record: SessionRecord,
        clock: Clock,
        env: Variables = (),
        parent: Live | None = None,
        *,
        stored: bool = False,
    ) -> None:
        self._record = record
        self._env = env
        self._merged: tuple[Variables, Variables, Variables] = ((), (), ())
        self._clock = clock
        # These never change.
        self.sandbox = record.sandbox
        self.session_id = record.session.session_id
        self.name: Name = (record.session.owner, record.session.tenant, record.session.session_id)
        self.payer = find_payer(record.session.owner, record.session.tenant)
        self.stored = stored
        self.parent = parent
        self.children: list[Live] = []  # those that are not gone; the registry writes it
        self.use = Use(clock, record.session.last_used, record.used_at)
        self.memory_kills = MemoryKills(clock)
        self.background = BackgroundRuns()
        self.hosts = HostsState()
        self.refusals = Notes()
        self.observing = asyncio.Lock()
        # The tasks of its life, and who asked for the last; lifecycle.py writes them.
        self.step: asyncio.Task[None] | None = None  # builds, stops or starts it
        self.ending: asyncio.Task[None] | None = None
        self.ended_by = ""  # empty: it ends by itself
        # Done when the sandbox is, or is about to be, no more.
        self.gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    # What it is

    @property
    def record(self) -> SessionRecord:
        return self._record

    @property
    def session(self) -> Session:
        """As it is on record; `show` has what is known only here."""
        return self._record.session

    @property
    def env(self) -> Variables:
        return self._env

    def environment(self, base: Variables) -> Variables:
        """The session's variables upon those that every command of its sandbox has: the same tuple each time, so that
        the link encodes it once."""
        known, own, merged = self._merged
        if base is not known or self._env is not own:
            merged = tuple(dict((*base, *self._env)).items())
            self._merged = (base, self._env, merged)
        return merged

    @property
    def identity(self) -> dict[str, object]:
        """For the audit log."""
        owner, tenant, session_id = self.name
        return {"session": session_id, "sandbox": self.sandbox, "owner": owner, "tenant": tenant}

    def show(self) -> Session:
        children = tuple(child.session_id for child in self.children)
        return replace(self.session, last_used=self.use.last_used, children=children)

    # Its life

    @property
    def phase(self) -> Phase:
        return self.session.phase

    @property
    def usable(self) -> bool:
        """Whether commands can run in it."""
        return self._record.session.phase is Phase.ACTIVE

    @property
    def stopped(self) -> bool:
        return self.phase is Phase.STOPPED

    @property
    def there(self) -> bool:
        """Whether it can be used, or had back."""
        return self.phase in _THERE

    def advance(self, event: Event, reason: str = "") -> None:
        """The only writer of the phase. What is begun again keeps its first reason; what is active has none."""
        phase = follow(self.phase, event)
        if phase is self.phase or not reason:
            reason = self._record.reason or reason
        session = replace(self.session, phase=phase)
        self._record = replace(self._record, session=session, reason="" if phase is Phase.ACTIVE else reason)

    def part(self, reason: str) -> None:
        """Tells those who wait for something in the sandbox that it is no more."""
        if not self.gone.done():
            self.gone.set_result(Gone(reason))

    def revive(
        self, env: Variables, env_keys: tuple[str, ...], secret_keys: tuple[str, ...], *, emulated: bool = False
    ) -> None:
        """It runs again, and nothing of what ran before: those who waited for that have been told."""
        session = replace(self.session, env_keys=env_keys, secret_keys=secret_keys, emulated=emulated)
        self._record = replace(self._record, session=session)
        self._env = env
        self.advance(Event.STARTED)
        self.memory_kills = MemoryKills(self._clock)
        self.background.clear()
        self.gone = asyncio.get_running_loop().create_future()
        self.touch()

    def recall(self, env: Variables) -> None:
        """A new daemon has read the environment that the sandbox keeps."""
        self._env = env

    def set_hosts(self, hosts: HostList) -> None:
        """The list that is in force from now on."""
        self._record = replace(self._record, session=replace(self.session, hosts=hosts))

    def mark_stored(self) -> None:
        """Its record is in the store."""
        self.stored = True

    # Use and idleness

    def touch(self) -> None:
        self.use.touch()
        if self.parent is not None:
            self.parent.touch()

    def begin_use(self) -> None:
        self.use.count += 1
        self.touch()

    def end_use(self) -> None:
        self.use.count -= 1
        self.touch()

    def in_use(self) -> InUse:
        """Counts as a use until its block ends."""
        return InUse(self)

    @property
    def alone(self) -> bool:
        """Whether at most one command runs in it."""
        return self.use.count <= 1 and not self.background

    @property
    def busy(self) -> bool:
        """Whether something goes on in it, or in a child of it."""
        making = self.parent is not None and self.phase is Phase.CREATING
        return bool(self.use.count or self.background.busy) or making or any(child.busy for child in self.children)

    @property
    def expired(self) -> bool:
        if self.session.persistent:
            return False
        return self.usable and not self.busy and self.use.idle >= self.session.ttl
