"""Sandboxes made ahead, so that a session need not wait for one.

A warm sandbox is nobody's: it may reach nothing, has no environment and has run no command. Claimed, it becomes one
session's for the rest of its life; it is never given back once anything of a session could have entered it. Each
has a row in the store from before it exists until after it is gone, so that the next daemon finds it or removes it.

Making them ahead has the lowest priority of all: one at a time, only while nobody waits for a session, and only while
the machine has memory to spare.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Reservation
from k8e.core.parts import Parts
from k8e.core.pool.demand import Demand, Template
from k8e.core.pool.memory import Memory
from k8e.core.runs.interpreters import park, waits_for_mounts
from k8e.core.sessions.provisioning import prepare_state
from k8e.core.store.records import WarmRecord
from k8e.core.tasks import stop, wait_done
from k8e.engine import EngineError, Place
from k8e.link.errors import LinkError
from k8e.link.model import Sandbox
from k8e.settings import PoolSettings

# After the last create somebody is about to run the first command; that comes first. Who creates without a pause must
# not keep the pool empty for ever, so there is an end to this courtesy, though never while a create is under way.
_PAUSE: Final = 0.05
_COURTESY: Final = 1.0
_FIRST_RETRY: Final = 1.0
_LAST_RETRY: Final = 60.0
_SLACK: Final = 1.25  # more memory than must stay free, before a new one is made: else it would be the next to go


@dataclass(frozen=True, slots=True)
class Claimed:
    """A warm sandbox that was found alive when it was taken, and the way into it."""

    name: str
    template: Template
    sandbox: Sandbox
    place: Place


@dataclass(slots=True)
class _Trouble:
    """Why a kind is not tried again at once."""

    delay: float
    until: float
    cause: str


class Pool:
    def __init__(self, parts: Parts, settings: PoolSettings, memory: Memory) -> None:
        self._engine = parts.engine
        self._store = parts.store
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._tasks = parts.tasks
        self.settings = settings
        self._memory = memory
        self._demand = Demand(settings.min, settings.max)
        self._ready: dict[Template, deque[str]] = {}  # the oldest first
        self._condemned: set[str] = set()  # to be destroyed, and could not be yet
        self._troubles: dict[Template, _Trouble] = {}
        self._free = 1.0  # share of the memory, when last looked at
        self._waiting = 0  # creates under way
        self._idle, self._busy = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._worker: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._closed = not settings.enabled

    @property
    def warm(self) -> int:
        return sum(map(len, self._ready.values()))

    # For whoever creates a session

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """While somebody waits for a session."""
        self._waiting += 1
        self._idle.clear()
        self._busy.set()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._idle.set()
                self._busy.clear()
            self._nudge()

    async def claim(self, template: Template, *, usual: bool) -> Claimed | None:
        """The oldest one, or None: then it takes a new one. Who asks first is served first, because nothing is waited
        for before one is taken. `usual`: it is what everybody gets who asks for nothing special."""
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
        self._metrics.claims.add("cold")
        return None

    def put_back(self, claimed: Claimed) -> None:
        """Nothing of a session came near it."""
        self._put(claimed.template, claimed.name, first=True)

    def waste(self, claimed: Claimed) -> None:
        """It could not be made somebody's."""
        self._discard(claimed.name, "unclaimed")

    def count_unbound(self, claimed: Claimed, error: EngineError) -> None:
        """It is somebody's by now, and could not be given what that one is to see: a new one takes its place."""
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
        """Something changed that may leave something to do."""
        if (self._worker is None or self._worker.done()) and self._choose() is not None:
            self._worker = self._tasks.spawn(self._refill())

    def _choose(self) -> Template | None:
        """The kind of which one is missing, the most urgent first."""
        now = self._clock.monotonic()
        if self._closed or self.warm >= self.settings.max or self._free < self.settings.free_memory * _SLACK:
            return None
        for template, wanted in self._demand.targets(now).items():
            trouble = self._troubles.get(template)
            if len(self._ready.get(template, ())) < wanted and (trouble is None or trouble.until <= now):
                return template
        return None

    async def _refill(self) -> None:
        while not self._closed:
            await self._wait_for_quiet()
            await self._look_at_memory()
            if self._adopting is not None:
                await wait_done(self._adopting)  # what is there already need not be made
            template = self._choose()
            if template is None:
                return
            await self._make(template)

    async def _wait_for_quiet(self) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.time() + _COURTESY
        while True:
            await self._idle.wait()
            if loop.time() >= patience:
                return
            try:
                async with asyncio.timeout(_PAUSE):
                    await self._busy.wait()
            except TimeoutError:
                return

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
            if not waits_for_mounts(template.shape, place):
                await park(sandbox, place, template.limits.memory)
            await self._store.set_ready(name, True)
        except BaseException as error:
            await self._destroy(name)
            if not isinstance(error, EngineError | LinkError | Fault):
                raise
            trouble = self._troubles.get(template)
            delay = min(trouble.delay * 2, _LAST_RETRY) if trouble else _FIRST_RETRY
            self._troubles[template] = _Trouble(delay, self._clock.monotonic() + delay, str(error))
            warn("not_refilled", runtime=template.runtime.value, retry=delay, cause=error)
            return
        self._troubles.pop(template, None)
        self._metrics.refill_seconds.observe(self._clock.monotonic() - began)
        self._put(template, name)

    # Having fewer

    async def review(self) -> None:
        """A part of the upkeep: gives back what is not worth having any more, and begins to make what is missing."""
        if self._closed:
            return
        await self._look_at_memory()
        targets = self._demand.targets(self._clock.monotonic())
        self._troubles = {kind: trouble for kind, trouble in self._troubles.items() if kind in targets}
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
        self._nudge()

    async def forget_images(self, left: Collection[str]) -> None:
        """Gives back what is made of any other image: as long as it is there, so are that image's layers."""
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
        """What a former daemon made ahead, by name. What it did not finish is gone when this returns; what was ready is
        looked at while sessions are served already."""
        records = await self._store.warm()
        whole = [record for record in records if record.ready and record.sandbox in found and not self._closed]
        await asyncio.gather(*(self._destroy(record.sandbox) for record in records if record not in whole))
        if whole:
            self._adopting = self._tasks.spawn(self._adopt(whole))
        return {record.sandbox for record in records}

    async def _adopt(self, records: Collection[WarmRecord]) -> None:
        for record in records:
            template = Template(record.runtime, record.image, record.limits, record.shape)
            spec = template.spec
            try:
                if await self._engine.edition(spec) != record.edition:
                    self._discard(record.sandbox, "outdated")
                    continue
                await self._engine.attach(record.sandbox)
            except (EngineError, LinkError) as error:
                warn("warm_lost", sandbox=record.sandbox, cause=error)
                self._discard(record.sandbox, "dead")
                continue
            self._demand.resume(template, self._clock.monotonic())
            self._put(template, record.sandbox)

    def keep(self, template: Template) -> None:
        """Has the minimum of this kind ready from now on, whether anybody asks or not."""
        if not self._closed:
            self._demand.keep(template)
            self._nudge()

    def reserve(self, name: str, template: Template, number: int) -> None:
        """So many of this kind are ready from now on, whether anybody asks or not, for as long as this daemon lives."""
        self._demand.reserve(name, template, number)
        self._troubles.pop(template, None)
        self._nudge()

    def reservations(self) -> Mapping[str, Reservation]:
        """By the name that they were made with. Two of one kind share what is ready."""
        found = {}
        targets = self._demand.targets(self._clock.monotonic())
        for name, (template, number) in self._demand.reserved.items():
            trouble = self._troubles.get(template)
            cause = trouble.cause if trouble else ""
            if not cause and self._free < self.settings.free_memory * _SLACK:
                cause = "the machine has too little free memory"
            ready = min(len(self._ready.get(template, ())), number)
            wanted = min(number, targets.get(template, 0))
            found[name] = Reservation(name, template.runtime, template.image, number, wanted, ready, cause)
        return found

    async def settle(self) -> None:
        """Returns when there is nothing to do."""
        while work := self._under_way():
            await wait_done(*work)

    async def close(self) -> None:
        """Stops making them. Those that are ready wait for the next daemon."""
        self._closed = True
        await stop(*self._under_way())

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [task for task in (self._adopting, self._worker) if task is not None and not task.done()]
