"""Sandboxes made ahead, so that a session need not wait for one.

A warm sandbox belongs to no session: it may reach nothing, has no environment and has run no command. A session that
claims it has it for the rest of its life; it is never put back once anything of a session could have entered it. Each
has a row in the store from before it exists until after it is gone, so that after a crash the next daemon finds it or
removes it. A daemon that is stopped removes all that no session has claimed.

Making them ahead has the lowest priority of all: one at a time, only while no caller waits for a session, and only
while the machine has memory to spare. An engine that has sandboxes ready by itself is told how many, and none is made
here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Reservation
from k8e.core.parts import Parts
from k8e.core.pool.demand import Demand, Retries, Template
from k8e.core.pool.memory import Memory
from k8e.core.pool.quiet import Quiet
from k8e.core.pool.stock import Stock
from k8e.core.sandbox.environment import prepare_state
from k8e.core.store.records import WarmRecord
from k8e.core.tasks import stop, wait_done
from k8e.engine import EngineError, Place, SandboxSpec
from k8e.link.errors import LinkError
from k8e.link.model import Sandbox
from k8e.settings import PoolSettings

Park = Callable[[Sandbox, Place, SandboxSpec], Awaitable[None]]  # parks interpreters in a warm sandbox

_SLACK: Final = 1.25  # more memory than must stay free, before one is made: else it would be the next to go


@dataclass(frozen=True, slots=True)
class Claimed:
    """A warm sandbox that was found alive when it was taken, and the way into it."""

    name: str
    template: Template
    sandbox: Sandbox
    place: Place


class Pool:
    def __init__(self, parts: Parts, settings: PoolSettings, memory: Memory, park: Park) -> None:
        self._engine = parts.engine
        self._store = parts.store
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._tasks = parts.tasks
        self.settings = settings
        self._memory = memory
        self._park = park
        self._demand = Demand(settings.min, settings.max)
        self._stock = Stock(parts.engine)
        self._ready: dict[Template, deque[str]] = {}  # the oldest first
        self._condemned: set[str] = set()  # to be destroyed, and could not be yet
        self._retries = Retries()
        self._free = 1.0  # share of the memory, when last looked at
        self._quiet = Quiet()
        self._worker: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._examined: set[str] = set()  # an earlier daemon's, until they are adopted
        self._closed = not settings.enabled

    @property
    def warm(self) -> int:
        return sum(map(len, self._ready.values())) + self._stock.total

    # For the creation of sessions

    @property
    def busy(self) -> bool:
        """Whether a caller waits for a session."""
        return self._quiet.busy

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """While a caller waits for a session."""
        try:
            with self._quiet.disturb():
                yield
        finally:
            self._nudge()

    async def claim(self, template: Template, *, usual: bool) -> Claimed | None:
        """The oldest of that kind, or None: then the session needs a new one. Callers are served in order, because
        nothing is awaited before one is taken. `usual`: the caller asked for nothing special."""
        if self._closed:
            return None
        self._demand.note(template, self._clock.monotonic(), usual=usual)
        while name := self._take(template):
            try:
                sandbox, place = await self._engine.attach(name)
            except (EngineError, LinkError) as error:
                warn("warm_lost", sandbox=name, cause=error)
                self._discard(name, "dead")
                continue
            except BaseException:
                self._put(template, name, first=True)
                raise
            self._metrics.claims.add("warm")
            return Claimed(name, template, sandbox, place)
        self._metrics.claims.add("warm" if self._stock.count(template) else "cold")
        return None

    def put_back(self, claimed: Claimed) -> None:
        """Nothing of a session has entered it."""
        self._put(claimed.template, claimed.name, first=True)

    def waste(self, claimed: Claimed) -> None:
        """It could not become the session's."""
        self._discard(claimed.name, "unclaimed")

    def count_unbound(self, claimed: Claimed, error: EngineError) -> None:
        """It is the session's already, and the session's directories could not be mounted: a new one replaces it."""
        self._metrics.discards.add("unbound")
        warn("warm_unbound", sandbox=claimed.name, cause=error)

    def _take(self, template: Template) -> str | None:
        waiting = self._ready.get(template)
        if not waiting:
            return None
        name = waiting.popleft()
        self._metrics.warm.value = self.warm
        return name

    def _put(self, template: Template, name: str, *, first: bool = False) -> None:
        waiting = self._ready.setdefault(template, deque())
        waiting.appendleft(name) if first else waiting.append(name)
        self._metrics.warm.value = self.warm

    # Making them

    def _nudge(self) -> None:
        """Begins to make what is missing, if anything is."""
        if (self._worker is None or self._worker.done()) and (self._stock.kept or self._choose() is not None):
            self._worker = self._tasks.spawn(self._refill())

    def _choose(self) -> Template | None:
        """The kind of which one is missing, the most urgent first."""
        now = self._clock.monotonic()
        if self._closed or self._stock.kept:
            return None
        if self.warm >= self.settings.max or self._free < self.settings.free_memory * _SLACK:
            return None
        for template, wanted in self._demand.targets(now).items():
            if len(self._ready.get(template, ())) < wanted and self._retries.may_try(template, now):
                return template
        return None

    async def _refill(self) -> None:
        while not self._closed:
            await self._quiet.wait()
            if await self._tell_engine():
                return
            await self._look_at_memory()
            if self._adopting is not None:
                await wait_done(self._adopting)  # what is there already need not be made
            template = self._choose()
            if template is None:
                return
            await self._make(template)

    async def _tell_engine(self) -> bool:
        """Whether the engine has them ready by itself."""
        try:
            await self._stock.tell({} if self._closed else self._demand.targets(self._clock.monotonic()))
        except EngineError as error:
            warn("not_kept_ready", cause=error)
        self._metrics.warm.value = self.warm
        return self._stock.kept

    async def _make(self, template: Template) -> None:
        began = self._clock.monotonic()
        spec = template.spec
        name = secrets.token_hex(8)
        try:
            edition = await self._engine.edition(spec)
            await self._store.insert_warm(
                WarmRecord(
                    name, template.runtime, template.image, template.limits, edition, ready=False, shape=template.shape
                )
            )
            await self._engine.create(name, spec)
            sandbox, place = await self._engine.attach(name)
            await prepare_state(sandbox)
            await self._park(sandbox, place, spec)
            await self._store.set_ready(name, True)
        except BaseException as error:
            await self._destroy(name)
            if not isinstance(error, EngineError | LinkError | Fault):
                raise
            delay = self._retries.fail(template, error, self._clock.monotonic())
            warn("not_refilled", runtime=template.runtime.value, retry=delay, cause=error)
            return
        self._retries.forget(template)
        self._metrics.refill_seconds.observe(self._clock.monotonic() - began)
        self._put(template, name)

    # Having fewer

    async def review(self) -> None:
        """Part of the upkeep: destroys those that are not worth having any more, and begins to make what is missing."""
        kept = await self._tell_engine()
        if self._closed:
            return
        await self._look_at_memory()
        targets = self._demand.targets(self._clock.monotonic())
        self._retries.keep(targets)
        # The kind last asked for is the last to go.
        kinds = sorted(self._ready, key=lambda kind: list(targets).index(kind) if kind in targets else len(targets))
        excess = math.ceil(self.warm / 2) if self._free < self.settings.free_memory else 0
        for kind in reversed(kinds):
            idle = max(0, len(self._ready[kind]) - targets.get(kind, 0))
            pressed = max(0, min(excess - idle, len(self._ready[kind]) - idle))
            excess -= idle + pressed
            for reason, number in (("idle", idle), ("memory", pressed)):
                for _ in range(number):
                    if name := self._take(kind):
                        self._discard(name, reason)
            if not self._ready[kind]:
                del self._ready[kind]
        for name in list(self._condemned):
            self._condemned.discard(name)
            self._tasks.spawn(self._destroy(name))
        if not kept:
            self._nudge()

    async def forget_images(self, left: Collection[str]) -> None:
        """Destroys those that are made of any other image: as long as one is there, so are its image's layers."""
        self._demand.forget_images(left)
        gone = [kind for kind in self._ready if kind.image not in left]
        names = [name for kind in gone for name in self._ready.pop(kind)]
        self._metrics.warm.value = self.warm
        for name in names:
            self._metrics.discards.add("outdated")
            note("warm_discarded", sandbox=name, reason="outdated")
        await asyncio.gather(*(self._destroy(name) for name in names))

    async def _look_at_memory(self) -> None:
        self._free = await asyncio.to_thread(self._memory.free_share)

    def _discard(self, name: str, reason: str) -> None:
        self._metrics.discards.add(reason)
        note("warm_discarded", sandbox=name, reason=reason)
        self._tasks.spawn(self._destroy(name))

    async def _destroy(self, name: str) -> None:
        try:
            await self._store.set_ready(name, False)
            await self._engine.destroy(name)
            await self._store.forget_warm(name)
        except (EngineError, Fault) as error:
            warn("warm_stays", sandbox=name, cause=error)
            self._condemned.add(name)

    # The pool's own life

    async def recover(self, found: Collection[str]) -> set[str]:
        """The names of all that an earlier daemon made ahead. What it did not finish is gone when this returns; what
        was ready is examined while sessions are served already."""
        records = await self._store.warm()
        whole = [record for record in records if record.ready and record.sandbox in found and not self._closed]
        await asyncio.gather(*(self._destroy(record.sandbox) for record in records if record not in whole))
        self._examined = {record.sandbox for record in whole}
        if whole:
            self._adopting = self._tasks.spawn(self._adopt(whole))
        return {record.sandbox for record in records}

    async def _adopt(self, records: Collection[WarmRecord]) -> None:
        for record in records:
            template = Template(record.runtime, record.image, record.limits, record.shape)
            flaw = await self._find_flaw(record, template.spec)
            self._examined.discard(record.sandbox)
            if flaw:
                self._discard(record.sandbox, flaw)
                continue
            self._demand.resume(template, self._clock.monotonic())
            self._put(template, record.sandbox)

    async def _find_flaw(self, record: WarmRecord, spec: SandboxSpec) -> str:
        """The reason not to adopt it; empty: there is none."""
        try:
            if await self._engine.edition(spec) != record.edition:
                return "outdated"
            await self._engine.attach(record.sandbox)
        except (EngineError, LinkError) as error:
            warn("warm_lost", sandbox=record.sandbox, cause=error)
            return "dead"
        return ""

    def keep(self, template: Template) -> None:
        """Keeps the minimum of this kind ready from now on, also when no caller asks for it."""
        if not self._closed:
            self._demand.keep(template)
            self._nudge()

    def reserve(self, name: str, template: Template, number: int) -> None:
        """Keeps that many of this kind ready as long as this daemon lives, also when no caller asks for them."""
        self._demand.reserve(name, template, number)
        self._retries.forget(template)
        self._nudge()

    def reservations(self) -> Mapping[str, Reservation]:
        """By name. Two reservations of one kind share what is ready."""
        found = {}
        targets = self._demand.targets(self._clock.monotonic())
        for name, (template, number) in self._demand.reserved.items():
            cause = self._retries.cause(template)
            if not cause and not self._stock.kept and self._free < self.settings.free_memory * _SLACK:
                cause = "the machine has too little free memory"
            ready = min(len(self._ready.get(template, ())) + self._stock.count(template), number)
            wanted = min(number, targets.get(template, 0))
            found[name] = Reservation(name, template.runtime, template.image, number, wanted, ready, cause)
        return found

    async def settle(self) -> None:
        """Returns when there is nothing to do."""
        while work := self._under_way():
            await wait_done(*work)

    async def close(self) -> None:
        """Stops making them, and begins to destroy those that no session has claimed: without a daemon no session ever
        will. What is not gone before the daemon is on record as not ready, and the next daemon removes it."""
        self._closed = True
        await stop(*self._under_way())
        if self._stock.kept:
            await self._tell_engine()
        unclaimed = {*self._examined, *(name for names in self._ready.values() for name in names)}
        self._examined.clear()
        self._ready.clear()
        self._metrics.warm.value = 0
        for name in unclaimed:
            self._discard(name, "stopped")

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [task for task in (self._adopting, self._worker) if task is not None and not task.done()]
