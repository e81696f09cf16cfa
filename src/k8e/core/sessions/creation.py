"""How a session comes to be: checked, chosen, counted, built; all of it or nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from k8e.core import checks
from k8e.core.access.access import choose_tenant
from k8e.core.access.quotas import Quotas
from k8e.core.access.turns import Turns
from k8e.core.egress.ceiling import check_ceiling, find_usual_hosts
from k8e.core.egress.observer import Observer
from k8e.core.errors import Fault, Kind
from k8e.core.images import Images
from k8e.core.log.daemon_log import note
from k8e.core.model import Caller, ManifestEntry, Phase, Session, SessionSpec
from k8e.core.parts import Parts
from k8e.core.pool.demand import Template
from k8e.core.pool.pool import Claimed, Pool
from k8e.core.runs.interpreters import Interpreters, waits_for_mounts
from k8e.core.sessions.environments import Environments
from k8e.core.sessions.live import Live, Registry
from k8e.core.sessions.manifest import check_entries
from k8e.core.sessions.phases import Event
from k8e.core.sessions.provisioning import Variables, apply_manifest, keep_env, make_workdir, prepare_state
from k8e.core.sessions.sessions import ABANDONED, Sessions
from k8e.core.sessions.shaping import check_shape
from k8e.core.store.records import SessionRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translate, translated
from k8e.engine import PLAIN, EngineError, Limits, MountRefused, Place, Runtime, SandboxSpec
from k8e.link.model import Sandbox
from k8e.policy import HostList

_BUILDS: Final = 16  # at once, of all payers together; more would only slow each other down


def make_id() -> str:
    return f"sess-{secrets.token_hex(8)}"


def make_sandbox_name() -> str:
    return secrets.token_hex(8)


class Creation:
    def __init__(
        self,
        parts: Parts,
        sessions: Sessions,
        registry: Registry,
        *,
        images: Images,
        pool: Pool,
        quotas: Quotas,
        interpreters: Interpreters,
        observer: Observer,
        environments: Environments,
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._registry = registry
        self.images = images
        self._pool = pool
        self._quotas = quotas
        self._interpreters = interpreters
        self._observer = observer
        self._environments = environments
        self.builds = Turns(_BUILDS)

    @property
    def default_limits(self) -> Limits:
        """What a session gets that says nothing."""
        given = self._parts.settings.limits
        return Limits(cpus=given.cpus, memory=given.memory, pids=given.pids, disk=given.disk)

    async def make(self, caller: Caller, spec: SessionSpec, *, fleeting: bool = False) -> Live:
        began = self._parts.clock.monotonic()
        checks.check_caller(caller)
        env = checks.check_session(spec)
        check_entries(spec.manifest)
        spec = replace(spec, shape=check_shape(caller, spec.shape))
        digest = await self.images.resolve(caller.uid, choose_tenant(caller, spec.tenant), spec.image)
        hosts = await self._choose_hosts(caller, spec)
        runtime = await self.choose_runtime(spec.runtime)
        session = self._describe(caller, spec, runtime, hosts)
        checks.check_memory(runtime, session.limits)
        with self._pool.foreground():
            claimed = await self._claim(spec, session, digest)
            sandbox = claimed.name if claimed else make_sandbox_name()
            clock = self._parts.clock
            record = SessionRecord(sandbox, session, clock.boot, clock.monotonic(), fleeting=fleeting, digest=digest)
            live = Live(record, clock, env)
            self.register(live, claimed)
            await self.bring_up(live, caller, spec.manifest, claimed)
        self.log_created(live, caller, began)
        return live

    async def bring_up(
        self, live: Live, caller: Caller, manifest: Sequence[ManifestEntry] = (), claimed: Claimed | None = None
    ) -> None:
        """All of what is registered, or nothing."""
        live.building = self._parts.tasks.spawn(self._build(live, caller, manifest, claimed), watched=True)
        try:
            await wait_done(live.building)
        except asyncio.CancelledError:
            self._sessions.end(live, ABANDONED)
            raise
        await self._check_built(live, live.building)

    def log_created(self, live: Live, caller: Caller, began: float) -> None:
        self._parts.metrics.creates.add()
        self._parts.metrics.create_seconds.observe(self._parts.clock.monotonic() - began)
        facts = {"session": live.session_id, "caller": caller.label, "sandbox": live.sandbox}
        note("session_created", **facts, runtime=live.session.runtime.value)

    async def _choose_hosts(self, caller: Caller, spec: SessionSpec) -> HostList:
        if spec.allowed_hosts is not None:
            if spec.more_hosts:
                checks.refuse("more_hosts", "is given together with allowed_hosts")
            hosts = checks.check_hosts("allowed_hosts", spec.allowed_hosts)
            await check_ceiling(self._parts, caller, "allowed_hosts", hosts)
            return hosts
        more = checks.check_hosts("more_hosts", spec.more_hosts)
        await check_ceiling(self._parts, caller, "more_hosts", more)
        return (await find_usual_hosts(self._parts)).plus(more)

    async def _claim(self, spec: SessionSpec, session: Session, digest: str) -> Claimed | None:
        template = Template(session.runtime, digest, session.limits, session.shape.unbound)
        usual = spec.runtime is None and replace(template, shape=PLAIN) == Template(
            session.runtime, limits=self.default_limits
        )
        # Whoever has a project in it works there, and is back soon.
        usual = usual and (template.shape == PLAIN or bool(template.shape.slots))
        return await self._pool.claim(template, usual=usual)

    def register(self, live: Live, claimed: Claimed | None = None) -> None:
        try:
            self._registry.check_name(live)  # before it counts as a creation
            self._quotas.check_session(live.payer, live.session.limits, self._registry)
            self._registry.add(live)
        except Fault:
            if claimed:
                self._pool.put_back(claimed)
            raise

    def _describe(self, caller: Caller, spec: SessionSpec, runtime: Runtime, hosts: HostList) -> Session:
        return Session(
            session_id=spec.session_id or make_id(),
            tenant=choose_tenant(caller, spec.tenant),
            owner=caller.uid,
            phase=Phase.CREATING,
            runtime=runtime,
            image=spec.image,
            limits=spec.limits or self.default_limits,
            env_keys=tuple(sorted((*spec.env, *spec.secrets))),
            created=self._parts.clock.wall(),
            last_used=self._parts.clock.wall(),
            ttl=self._parts.settings.limits.ttl if spec.ttl is None else spec.ttl,
            hosts=hosts,
            persistent=spec.persistent,
            shape=spec.shape,
            labels=dict(spec.labels),
            secret_keys=tuple(sorted(spec.secrets)),
        )

    async def choose_runtime(self, wanted: Runtime | None) -> Runtime:
        reports = await self._sessions.probe()
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
        self, live: Live, caller: Caller, manifest: Sequence[ManifestEntry], claimed: Claimed | None
    ) -> None:
        made_with = live.session.hosts
        sandbox, place = await (self._bind(live, claimed) if claimed else self._make(live))
        await keep_env(sandbox, live.env)
        await self._keep_env(live)
        await self._furnish(live, sandbox, place, live.env, manifest)
        await make_workdir(sandbox, place, live.session.workdir)
        await self._log_creation(live, caller)
        async with live.changing_hosts:
            if live.session.hosts != made_with:  # a parent's became narrower meanwhile
                with translated("putting the session's list of hosts in force"):
                    await self._parts.engine.set_egress(live.sandbox, live.session.hosts)
            await self._parts.store.set_phase(live.sandbox, Phase.ACTIVE, durable=live.session.persistent)
            if live.ending is not None:
                return
            live.advance(Event.BUILT)
        live.touch()
        parked = claimed is not None and sandbox is claimed.sandbox
        parked = parked and not waits_for_mounts(live.session.shape.unbound, place)
        self._interpreters.begin(live, sandbox, place, warm=parked)
        self._parts.metrics.sessions.value = len(self._registry)

    async def _keep_env(self, live: Live) -> None:
        plain = tuple(pair for pair in live.env if pair[0].decode() not in live.session.secret_keys)
        if live.session.persistent and plain:
            await self._environments.keep(live.sandbox, plain)

    async def _make(self, live: Live) -> tuple[Sandbox, Place]:
        record = live.record
        await self._parts.store.insert_session(record)
        live.stored = True
        async with self.builds.take(live.payer):
            return await self._make_sandbox(live)

    @staticmethod
    def describe(record: SessionRecord) -> SandboxSpec:
        """The sandbox of a session, when it is made and whenever it is started again."""
        session = record.session
        return SandboxSpec(
            session.runtime,
            record.digest,
            session.limits,
            egress=session.hosts,
            shape=session.shape,
            shares=record.parent_sandbox,
        )

    async def _make_sandbox(self, live: Live) -> tuple[Sandbox, Place]:
        record = live.record
        with translated("creating the sandbox"):
            await self._parts.engine.create(live.sandbox, self.describe(record))
            sandbox, place = await self._parts.engine.attach(live.sandbox)
        await prepare_state(sandbox)
        return sandbox, place

    async def _bind(self, live: Live, claimed: Claimed) -> tuple[Sandbox, Place]:
        """Makes a warm sandbox this session's: on record first, so that no crash can give it to another one."""
        try:
            await self._parts.store.claim_warm(live.record)
        except Fault:
            self._pool.waste(claimed)
            raise
        live.stored = True
        with translated("putting the session's list of hosts in force"):
            await self._parts.engine.set_egress(live.sandbox, live.session.hosts)
        if not live.session.shape.mounts:
            return claimed.sandbox, claimed.place
        try:
            await self._parts.engine.bind(live.sandbox, live.session.shape.mounts)
        except EngineError as error:
            if isinstance(error, MountRefused):
                raise translate(error, "creating the sandbox") from error
            self._pool.count_unbound(claimed, error)
            return await self._replace(live)
        return claimed.sandbox, claimed.place

    async def _replace(self, live: Live) -> tuple[Sandbox, Place]:
        """With one that is made for it alone: what nobody could be given late it may still have from the beginning."""
        with translated("removing a sandbox that is of no use"):
            await self._parts.engine.destroy(live.sandbox)
        async with self.builds.take(live.payer):
            return await self._make_sandbox(live)

    async def _furnish(
        self, live: Live, sandbox: Sandbox, place: Place, env: Variables, entries: Sequence[ManifestEntry]
    ) -> None:
        if not entries:
            return
        mark = await self._observer.mark(live)
        try:
            await apply_manifest(sandbox, place, env, entries)
        except Fault as fault:
            raise await self._observer.explain(live, mark, fault) from fault.__cause__

    async def _log_creation(self, live: Live, caller: Caller) -> None:
        session = live.session
        await self._parts.audit.record(
            "session_created",
            **live.identity,
            caller=caller.label,
            runtime=session.runtime.value,
            image=session.image,
            digest=live.record.digest,
            limits=asdict(session.limits),
            ttl=session.ttl,
            env_keys=session.env_keys,
            allowed_hosts=session.hosts.texts,
            shape=asdict(session.shape),
            **({"parent": session.parent, **session.labels} if session.parent else {}),
        )

    async def _check_built(self, live: Live, building: asyncio.Task[None]) -> None:
        if building.cancelled() or live.ending is not None:
            raise Fault(Kind.CONFLICT, "session_destroyed", f"session {live.session_id} was destroyed meanwhile")
        error = building.exception()
        if error is None:
            return
        if not live.stored:
            self._registry.remove(live)
        else:
            await wait_done(self._sessions.end(live, ABANDONED))
        raise error

    def prewarm(self) -> None:
        """Has sandboxes ready from the beginning, where that is wanted."""
        if self._pool.settings.prewarm:
            self._parts.tasks.spawn(self._prewarm())

    async def _prewarm(self) -> None:
        self._pool.keep(Template(await self.choose_runtime(None), limits=self.default_limits))
