"""`Service`: puts the parts together, hands doors a part for each noun, and looks after sessions in the background."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from k8e.core.approvals.approvals import Approvals
from k8e.core.checks import check_caller
from k8e.core.clock import Clock, SystemClock
from k8e.core.errors import Fault
from k8e.core.files import Files
from k8e.core.images import Images
from k8e.core.log.audit import Audit, call
from k8e.core.log.daemon_log import LOGGER, warn
from k8e.core.log.metrics import Metrics
from k8e.core.log.refusal_log import RefusalLog
from k8e.core.model import Caller, ServiceStatus
from k8e.core.parts import Parts
from k8e.core.pool.memory import Memory, SystemMemory
from k8e.core.pool.pool import Pool
from k8e.core.ports import Ports
from k8e.core.recovery import Recovery
from k8e.core.reservations import Reservations
from k8e.core.runs.attachment import Attachments
from k8e.core.runs.background import Background
from k8e.core.runs.endings import Endings
from k8e.core.runs.foreground import Foreground, Once
from k8e.core.runs.launcher import Launcher
from k8e.core.runs.runs import Runs
from k8e.core.runs.terminals import Terminals
from k8e.core.sessions.builder import Builder
from k8e.core.sessions.calls import SessionCalls
from k8e.core.sessions.children import Children
from k8e.core.sessions.creation import Creation, probe_runtimes
from k8e.core.sessions.hosts import Hosts
from k8e.core.sessions.interpreters import Interpreters, park
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.lifetimes import Lifetimes
from k8e.core.sessions.live import Live
from k8e.core.sessions.persistence import Persistence
from k8e.core.sessions.quotas import Quotas, measure_share
from k8e.core.sessions.sessions import AT_ONCE, Observer, Registry, Sessions
from k8e.core.store.environments import Environments, FileEnvironments
from k8e.core.store.store import Store
from k8e.core.tasks import Tasks, do_in_turn, stop
from k8e.core.translation import translate
from k8e.engine import Engine, EngineError, Limits
from k8e.settings import PoolSettings, Settings

UPKEEP_SECONDS: Final = 2.0
_PATIENCE: Final = 15.0  # at the end, for what is under way


class Service:
    """Implements `contract`. Call `recover` before anything else, then `keep_up`, in the end `close`."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        clock: Clock | None = None,
        settings: Settings | None = None,
        pool: PoolSettings | None = None,  # None: nothing is made ahead
        memory: Memory | None = None,
        audit_file: Path | None = None,
        environments: Environments | None = None,  # None: persistent sessions can have none
    ) -> None:
        clock, settings = clock or SystemClock(), settings or Settings()
        self.metrics = metrics = Metrics()
        self.audit = Audit(audit_file, settings.audit, metrics, clock)
        self._state = audit_file.parent if audit_file else None
        self._parts = parts = Parts(
            engine=engine,
            store=store,
            environments=environments or FileEnvironments(None),
            clock=clock,
            tasks=Tasks(),
            settings=settings,
            metrics=metrics,
            audit=self.audit,
            refusals=RefusalLog(audit_file, settings.audit, metrics, clock),
        )
        self._registry = registry = Registry()
        self._observer = observer = Observer(parts)
        self._quotas = quotas = Quotas(parts, registry)
        self._pool = made_ahead = Pool(parts, pool or PoolSettings(enabled=False), memory or SystemMemory(), park)
        self._interpreters = interpreters = Interpreters(parts, lambda: made_ahead.busy)
        self._lifecycle = lifecycle = Lifecycle(parts, registry, observer)
        self._lifetimes = Lifetimes(parts, registry)
        self._sessions = sessions = Sessions(parts, registry, observer, lifecycle.give_up)
        self.files = Files(parts, sessions)
        self.ports = Ports(parts, sessions)
        self.approvals = Approvals(parts, sessions, registry)
        self.images = Images(parts, registry, made_ahead)
        builder = Builder(parts, registry, observer, made_ahead, interpreters)
        self._creation = creation = Creation(
            parts, registry, lifecycle, self.images.resolve, made_ahead, quotas, builder
        )
        self.warm = Reservations(parts, made_ahead, creation)
        self._hosts = Hosts(parts, sessions, registry, lifecycle)
        self._endings = endings = Endings(parts, sessions)
        launcher = Launcher(parts, sessions, quotas, endings)
        self._foreground = foreground = Foreground(parts, sessions, launcher, endings, interpreters)
        self._attachments = attached = Attachments()
        self._background = background = Background(parts, sessions, observer, launcher, endings, attached)
        self._once = Once(lifecycle, registry, creation, foreground)
        self.terminals = Terminals(parts, sessions, background, attached)
        self.runs = Runs(parts, sessions, registry, foreground, background, self._once, attached)
        end_runs, review_approvals = self.runs.end_all, self.approvals.review
        persistence = Persistence(parts, sessions, lifecycle, builder, end_runs, review_approvals, quotas, interpreters)
        children = Children(parts, sessions, creation, made_ahead, quotas)
        self.sessions = SessionCalls(
            parts, sessions, registry, lifecycle, observer, creation, children, persistence, self._hosts
        )
        self._recovery = Recovery(parts, sessions, registry, lifecycle, endings, background, self._hosts, made_ahead)
        self._upkeep: asyncio.Task[None] | None = None

    # The service's own life

    async def recover(self) -> None:
        await self.audit.record("daemon_started", pid=os.getpid(), version=importlib.metadata.version("k8e"))
        self._tell_damages()  # of a database that was set aside, whatever becomes of the rest
        await self._recovery.recover()
        self._quotas.recall_creations()
        await self.approvals.recover()
        self._tell_damages()

    def _tell_damages(self) -> None:
        """Logs the damaged files of the state directory that any room has found."""
        of_engine, of_store = self._parts.engine.damages(), self._parts.store.damages.take()
        self.audit.note_damages((*of_engine, *of_store, *self._parts.environments.damages.take()))

    def keep_up(self, seconds: float = UPKEEP_SECONDS) -> None:
        """Begins the upkeep in the background."""
        self._creation.prewarm()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(seconds))

    def begin_close(self) -> None:
        """To be called before the doors close: what they end from now on was ended because the daemon stops."""
        self._endings.begin_close()
        self._attachments.close()

    async def close(self) -> None:
        """Ends foreground runs; sandboxes and background runs live on. The store is for its owner to close."""
        self.begin_close()
        if self._upkeep is not None:
            await stop(self._upkeep)
        await self._pool.close()
        await self.ports.close()
        await self.images.close()
        self.approvals.close()
        self._interpreters.close()
        for run in list(self._foreground.running.values()):
            run.leave()
        self._once.close()
        await self._parts.tasks.close(_PATIENCE)
        try:
            await self._sessions.save_uses()
        except Fault as fault:
            warn("uses_not_saved", detail=fault.detail)
        self.audit.note("daemon_stopped", pid=os.getpid())
        await self.audit.close()
        await self._parts.refusals.close()

    async def _keep_up(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look_after()
            except Fault as fault:
                warn("upkeep_failed", code=fault.code, detail=fault.detail)
            except Exception:  # noqa: BLE001 - whatever it was, it must not be the last round
                LOGGER.exception("upkeep_failed")

    async def look_after(self) -> None:
        """One round of upkeep."""
        active = [live for live in self._registry if live.usable]
        await do_in_turn(self._sessions.examine, [live for live in active if live.busy], AT_ONCE)
        await self.expire()
        self._lifecycle.resume_ends()
        await self._observer.observe_some(active)
        await self.audit.sync()
        self._parts.refusals.review()
        await self._parts.refusals.sync()
        await self._hosts.save()
        self._tell_damages()
        await self.approvals.review()
        await self._sessions.save_uses()
        await self._lifetimes.review()
        await self._pool.review()

    async def expire(self) -> Sequence[str]:
        """Ends sessions that were not used for longer than their ttl. A command that runs is a use."""
        active = [live for live in self._registry if live.usable and live.background]
        # A collection that is under way may wait for an agent that does not answer.
        idle = [live for live in active if not live.background.collecting.locked()]
        await asyncio.gather(*(self._collect(live) for live in idle))
        return await self._lifecycle.expire()

    async def _collect(self, live: Live) -> None:
        try:
            await self._background.collect(live)
        except Fault as fault:
            warn("not_collected", session=live.session_id, code=fault.code, detail=fault.detail)

    # What doors ask of the service as a whole; the rest they ask of its parts

    @property
    def default_limits(self) -> Limits:
        return self._creation.default_limits

    @call("status")
    async def status(self, caller: Caller) -> ServiceStatus:
        check_caller(caller)
        reports = await probe_runtimes(self._parts)
        default = next((report.runtime for report in reports if report.available), None)
        return ServiceStatus(
            available=default is not None,
            version=importlib.metadata.version("k8e"),
            runtime=default,
            runtimes=reports,
            sessions=len(self._registry.visible(caller)),
            warm=self._pool.warm,
        )

    async def expose(self) -> None:
        try:
            room = await self._parts.engine.measure_room()
        except EngineError as error:
            raise translate(error, "measuring the room for sandboxes") from error
        self._quotas.expose(measure_share(self._state, room))

    def turn_away(self, who: str, call: str, code: str, source: str = "") -> None:
        about = {"caller": who[:100], **({"source": source[:100]} if source else {})}
        origin = source or who
        self._parts.refusals.note("access_refused", origin, about, peer=bool(source), call=call[:100], code=code)
