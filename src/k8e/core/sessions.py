"""The life of a session: created, used, destroyed. Each phase is written down before the step it announces.

Building and ending are the service's own tasks. A caller that disappears in the middle changes nothing about how they
finish, and whoever comes second waits for the first instead of doing it again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from k8e.core import checks
from k8e.core.access import choose_tenant
from k8e.core.audit import Audit
from k8e.core.clock import Clock
from k8e.core.demand import Template
from k8e.core.errors import Fault, Kind
from k8e.core.journal import note, warn
from k8e.core.live import Live, Registry
from k8e.core.manifest import check_entries
from k8e.core.metrics import Metrics
from k8e.core.model import Caller, ManifestEntry, Phase, Session, SessionSpec
from k8e.core.pool import Claimed, Pool
from k8e.core.provisioning import Variables, apply_manifest, keep_env, prepare_state
from k8e.core.quotas import Quotas
from k8e.core.records import SessionRecord
from k8e.core.store import Store
from k8e.core.tasks import Tasks
from k8e.core.translation import translate, translated
from k8e.core.turns import Turns
from k8e.core.witness import Witness
from k8e.engine import Engine, EngineError, Health, Limits, Place, Runtime, RuntimeReport, SandboxSpec
from k8e.link.errors import LinkError
from k8e.link.model import Sandbox
from k8e.policy import HostList
from k8e.settings import Settings

_BUILDS: Final = 16  # at once, of all payers together; more would only slow each other down

DESTROYED: Final = "destroyed"
EXPIRED: Final = "expired"
LOST: Final = "lost"
ABANDONED: Final = "abandoned"  # before it was ready; such a session leaves no record

# What somebody hears who comes too late.
_ENDS: Final = {
    DESTROYED: "it was destroyed",
    EXPIRED: "it expired: nobody used it for longer than its ttl",
    LOST: "its sandbox ended by itself",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that can be used, and the way into it."""

    live: Live
    sandbox: Sandbox
    place: Place


def describe_end(reason: str) -> str:
    return _ENDS.get(reason, reason)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Sessions:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        tasks: Tasks,
        settings: Settings,
        pool: Pool,
        audit: Audit,
    ) -> None:
        self.registry = Registry()
        self.engine = engine
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self.tasks = tasks
        self.settings = settings
        self.pool = pool
        self.quotas = Quotas(settings.quotas, clock)
        self._builds = Turns(_BUILDS)
        self.audit = audit
        self.witness = Witness(engine, metrics, audit)

    @property
    def default_limits(self) -> Limits:
        """What a session gets that says nothing."""
        given = self.settings.limits
        return Limits(cpus=given.cpus, memory=given.memory, pids=given.pids, disk=given.disk)

    # Asking

    async def get(self, caller: Caller, session_id: str) -> Session:
        live = self.find(caller, session_id)
        if live.phase is Phase.ACTIVE:
            await self.witness.hear(live)
        return replace(live.show(), denied=live.refusals.recent(live.session_id))

    async def list(self, caller: Caller, *, all_phases: bool) -> Sequence[Session]:
        checks.check_caller(caller)
        living = [live.show() for live in self.registry.visible(caller)]
        if not all_phases:
            return [session for session in living if session.phase is Phase.ACTIVE]
        ended = await self.store.ended_sessions(caller)
        return [*(record.show() for record in ended), *living]

    def find(self, caller: Caller, session_id: str) -> Live:
        checks.check_caller(caller)
        return self.registry.find(caller, checks.check_name("session_id", session_id))

    async def open(self, caller: Caller, session_id: str) -> Opened:
        return await self.enter(self.find(caller, session_id))

    def check_active(self, live: Live) -> None:
        if live.phase is not Phase.ACTIVE:
            what = "is still being created" if live.phase is Phase.CREATING else "is being destroyed"
            raise Fault(Kind.CONFLICT, f"session_{live.phase.value}", f"session {live.session_id} {what}")

    async def enter(self, live: Live) -> Opened:
        self.check_active(live)
        try:
            sandbox, place = await self.engine.attach(live.sandbox)
        except (EngineError, LinkError) as error:
            await self.examine(live)
            if live.phase is not Phase.ACTIVE:
                raise self.describe_loss(live) from error
            raise translate(error, "reaching the sandbox") from error
        return Opened(live, sandbox, place)

    async def examine(self, live: Live) -> Health:
        """Asks the engine how a sandbox is; the session of a dead one is ended."""
        try:
            health = await self.engine.health(live.sandbox)
        except EngineError as error:
            warn("health_unknown", session=live.session_id, sandbox=live.sandbox, cause=error)
            return Health(alive=True, oom_kills=0)
        live.oom_kills = max(live.oom_kills, health.oom_kills)
        if not health.alive and live.phase is Phase.ACTIVE:
            warn("sandbox_died", session=live.session_id, sandbox=live.sandbox, oom_kills=health.oom_kills)
            self.end(live, LOST)
        return health

    def describe_loss(self, live: Live) -> Fault:
        return Fault(
            Kind.NOT_FOUND,
            "session_not_found",
            f"there is no session {live.session_id} any more",
            detail=describe_end(live.record.reason),
            hint="Create a new session; what was in the old one is gone.",
        )

    # Creating

    async def create(self, caller: Caller, spec: SessionSpec) -> Session:
        began = self.clock.monotonic()
        checks.check_caller(caller)
        env = checks.check_session(spec)
        check_entries(spec.manifest)
        choose_tenant(caller, spec.tenant)
        hosts = await self._choose_hosts(spec)
        runtime = await self._choose_runtime(spec.runtime)
        record = self._make_record(caller, spec, runtime, hosts)
        with self.pool.foreground():
            claimed = await self._claim(spec, record)
            live = Live(replace(record, sandbox=claimed.name) if claimed else record, self.clock, env)
            self._register(live, claimed)
            live.building = self.tasks.spawn(self._build(live, caller, spec, env, claimed), watched=True)
            try:
                await asyncio.wait({live.building})
            except asyncio.CancelledError:
                self.end(live, ABANDONED)
                raise
            await self._check_built(live, live.building)
        self.metrics.creates.add()
        self.metrics.create_seconds.observe(self.clock.monotonic() - began)
        facts = {"session": live.session_id, "caller": caller.label, "sandbox": live.sandbox}
        note("session_created", **facts, runtime=runtime.value)
        return live.show()

    async def _choose_hosts(self, spec: SessionSpec) -> HostList:
        if spec.allowed_hosts is not None:
            return checks.check_hosts("allowed_hosts", spec.allowed_hosts)
        if self.settings.egress.allowed_hosts is not None:
            return self.settings.egress.allowed_hosts
        with translated("finding out the usual list of hosts"):
            return await self.engine.default_egress()

    async def _claim(self, spec: SessionSpec, record: SessionRecord) -> Claimed | None:
        template = Template(record.runtime, record.image, record.limits)
        usual = spec.runtime is None and template == Template(record.runtime, limits=self.default_limits)
        return await self.pool.claim(template, usual=usual)

    def _register(self, live: Live, claimed: Claimed | None) -> None:
        try:
            self.registry.check_name(live)  # before it counts as a creation
            self.quotas.check_session(live.payer, live.record.limits, self.registry)
            self.registry.add(live)
        except Fault:
            if claimed:
                self.pool.put_back(claimed)
            raise

    def _make_record(self, caller: Caller, spec: SessionSpec, runtime: Runtime, hosts: HostList) -> SessionRecord:
        return SessionRecord(
            sandbox=secrets.token_hex(8),
            session_id=spec.session_id or f"sess-{secrets.token_hex(8)}",
            tenant=choose_tenant(caller, spec.tenant),
            owner=caller.uid,
            phase=Phase.CREATING,
            runtime=runtime,
            image=spec.image,
            limits=spec.limits or self.default_limits,
            env_keys=tuple(sorted(spec.env)),
            created=self.clock.wall(),
            last_used=self.clock.wall(),
            ttl=self.settings.limits.ttl if spec.ttl is None else spec.ttl,
            boot=self.clock.boot,
            used_at=self.clock.monotonic(),
            hosts=hosts,
        )

    async def probe(self) -> Sequence[RuntimeReport]:
        with translated("trying the runtimes"):
            return await self.engine.probe()

    async def _choose_runtime(self, wanted: Runtime | None) -> Runtime:
        reports = await self.probe()
        for report in reports:
            if report.available and wanted in (None, report.runtime):
                return report.runtime
            if report.runtime is wanted:
                error = f"runtime {wanted.value} does not work here"
                raise Fault(Kind.UNAVAILABLE, "runtime_unavailable", error, detail=report.reason, hint=report.hint)
        if wanted is not None:
            raise Fault(Kind.UNAVAILABLE, "runtime_unavailable", f"runtime {wanted.value} is not known here")
        reasons = "; ".join(f"{report.runtime.value}: {report.reason}" for report in reports)
        hint = next((report.hint for report in reports if report.hint), "")
        raise Fault(Kind.UNAVAILABLE, "no_runtime", "no runtime works here", detail=reasons, hint=hint)

    async def _build(
        self, live: Live, caller: Caller, spec: SessionSpec, env: Variables, claimed: Claimed | None
    ) -> None:
        sandbox, place = await (self._bind(live, claimed) if claimed else self._make(live))
        await keep_env(sandbox, env)
        await self._furnish(live, sandbox, place, env, spec.manifest)
        await self._log_creation(live, caller)
        await self.store.set_phase(live.sandbox, Phase.ACTIVE)
        if live.ending is None:
            live.enter(Phase.ACTIVE)
            live.touch()
            self.metrics.sessions.value = len(self.registry)

    async def _make(self, live: Live) -> tuple[Sandbox, Place]:
        record = live.record
        await self.store.insert_session(record)
        live.stored = True
        async with self._builds.take(live.payer):
            return await self._make_sandbox(live)

    async def _make_sandbox(self, live: Live) -> tuple[Sandbox, Place]:
        record = live.record
        with translated("creating the sandbox"):
            wanted = SandboxSpec(record.runtime, record.image, record.limits, egress=record.hosts)
            await self.engine.create(live.sandbox, wanted)
            sandbox, place = await self.engine.attach(live.sandbox)
        await prepare_state(sandbox)
        return sandbox, place

    async def _bind(self, live: Live, claimed: Claimed) -> tuple[Sandbox, Place]:
        """Makes a warm sandbox this session's: on record first, so that no crash can give it to another one."""
        try:
            await self.store.claim_warm(live.record)
        except Fault:
            self.pool.waste(claimed)
            raise
        live.stored = True
        with translated("putting the session's list of hosts in force"):
            await self.engine.set_egress(live.sandbox, live.record.hosts)
        return claimed.sandbox, claimed.place

    async def _furnish(
        self, live: Live, sandbox: Sandbox, place: Place, env: Variables, entries: Sequence[ManifestEntry]
    ) -> None:
        if not entries:
            return
        mark = await self.witness.mark(live)
        try:
            await apply_manifest(sandbox, place, env, entries)
        except Fault as fault:
            raise await self.witness.explain(live, mark, fault) from fault.__cause__

    async def _log_creation(self, live: Live, caller: Caller) -> None:
        record = live.record
        await self.audit.record(
            "session_created",
            **live.identity,
            caller=caller.label,
            runtime=record.runtime.value,
            image=record.image,
            limits=asdict(record.limits),
            ttl=record.ttl,
            env_keys=record.env_keys,
            allowed_hosts=record.hosts.texts,
        )

    async def _check_built(self, live: Live, building: asyncio.Task[None]) -> None:
        if building.cancelled() or live.ending is not None:
            raise Fault(Kind.CONFLICT, "session_destroyed", f"session {live.session_id} was destroyed meanwhile")
        error = building.exception()
        if error is None:
            return
        if not live.stored:
            self.registry.remove(live)
        else:
            await asyncio.wait({self.end(live, ABANDONED)})
        raise error

    # Ending

    async def destroy(self, caller: Caller, session_id: str) -> None:
        live = self.find(caller, session_id)
        if live.ending is not None:
            # Somebody else destroys it. When this answer is given it is gone, and they were the one who did it.
            await asyncio.wait({live.ending})
            if not _failed(live.ending):
                raise self.describe_loss(live)
        live.ended_by = caller.label
        await asyncio.shield(self.end(live, DESTROYED))

    def end(self, live: Live, reason: str) -> asyncio.Task[None]:
        """Begins to end a session, once; the first reason counts."""
        if live.ending is None or _failed(live.ending):
            if not live.record.reason:
                live.enter(Phase.DESTROYING, ABANDONED if live.phase is Phase.CREATING else reason)
            live.part(describe_end(live.record.reason))
            live.ending = self.tasks.spawn(self._end(live))
        return live.ending

    async def _end(self, live: Live) -> None:
        if live.building is not None and not live.building.done():
            live.building.cancel()
            await asyncio.wait({live.building})
        try:
            await self.store.set_phase(live.sandbox, Phase.DESTROYING, live.record.reason)
        except Fault as fault:
            # Goes on: a full disk must not keep anybody from destroying. An active session whose sandbox is
            # gone is what the next daemon would find, and knows to clear up.
            warn("phase_not_written", sandbox=live.sandbox, detail=fault.detail)
        if live.record.reason != ABANDONED:
            await self.witness.hear(live)  # for the last time
        with translated("destroying the sandbox"):
            await self.engine.destroy(live.sandbox)
        reason = live.record.reason
        if reason == ABANDONED:
            await self.store.forget_session(live.sandbox)
        else:
            await self.store.end_session(live.sandbox, reason, self.clock.wall(), keep_runs=reason == LOST)
            self.registry.remember_end(live.name, describe_end(reason))
        live.enter(Phase.DESTROYED)
        self.registry.remove(live)
        self.metrics.destroys.add(reason)
        self.metrics.sessions.value = len(self.registry)
        note("session_ended", session=live.session_id, sandbox=live.sandbox, reason=reason)
        self.audit.note("session_ended", **live.identity, caller=live.ended_by, reason=reason)

    # Upkeep

    def prewarm(self) -> None:
        """Has sandboxes ready from the beginning, where that is wanted."""
        if self.pool.settings.prewarm:
            self.tasks.spawn(self._prewarm())

    async def _prewarm(self) -> None:
        self.pool.keep(Template(await self._choose_runtime(None), limits=self.default_limits))

    async def expire(self) -> Sequence[str]:
        """Ends the sessions that nobody has used for longer than their ttl; returns their ids."""
        expired = [live for live in self.registry if live.expired]
        for live in expired:
            self.end(live, EXPIRED)
        await asyncio.gather(*(live.ending for live in expired if live.ending), return_exceptions=True)
        return [live.session_id for live in expired]

    def resume_ends(self) -> None:
        """Tries again to end what could not be ended."""
        for live in self.registry:
            if live.ending is not None and _failed(live.ending):
                self.end(live, live.record.reason)

    async def save_uses(self) -> None:
        unsaved = [live for live in self.registry if live.unsaved and live.stored]
        for live in unsaved:
            live.unsaved = False
        if unsaved:
            await self.store.set_used((live.sandbox, live.last_used, live.used_at) for live in unsaved)
