"""Creates sessions: checks and completes the request, counts it against quotas, has the sandbox built."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from k8e.core import checks
from k8e.core.access.access import choose_tenant
from k8e.core.egress.ceiling import check_ceiling, find_usual_hosts
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note
from k8e.core.model import Caller, ManifestEntry, Phase, Session, SessionSpec
from k8e.core.parts import Parts
from k8e.core.pool.demand import Template
from k8e.core.pool.pool import Claimed, Pool
from k8e.core.sandbox.manifest import check_entries
from k8e.core.sessions.builder import Builder
from k8e.core.sessions.ends import ABANDONED
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.mounts import check_shape
from k8e.core.sessions.quotas import Quotas
from k8e.core.sessions.sessions import Registry
from k8e.core.store.records import SessionRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translated
from k8e.engine import PLAIN, Limits, Runtime, RuntimeReport
from k8e.policy import HostList

ResolveImage = Callable[[int, str, str], Awaitable[str]]  # the digest of an image, by its owner, tenant and name


async def probe_runtimes(parts: Parts) -> Sequence[RuntimeReport]:
    with translated("trying the runtimes"):
        return await parts.engine.probe()


_DOCTOR: Final = "`k8e doctor` says which runtimes work on this machine, and what to install for others."


async def choose_runtime(parts: Parts, wanted: Runtime | None) -> Runtime:
    return (await find_runtime(parts, wanted)).runtime


async def find_runtime(parts: Parts, wanted: Runtime | None) -> RuntimeReport:
    """Returns the report of one that works: the one that is wanted, or the strongest."""
    with translated("trying the runtimes"):
        report = await parts.engine.choose(wanted)
    if report.available:
        return report
    if wanted is not None:
        error = f"runtime {wanted.value} does not work here"
        raise Fault(Kind.UNAVAILABLE, "runtime_unavailable", error, detail=report.reason, hint=report.hint or _DOCTOR)
    reports = await probe_runtimes(parts)
    reasons = "; ".join(f"{report.runtime.value}: {report.reason}" for report in reports)
    hint = next((report.hint for report in reports if report.hint), _DOCTOR)
    raise Fault(Kind.UNAVAILABLE, "no_runtime", "no runtime works here", detail=reasons, hint=hint)


def make_id() -> str:
    return f"sess-{secrets.token_hex(8)}"


def make_sandbox_name() -> str:
    return secrets.token_hex(8)


def _check_workdir(path: str) -> str:
    if not path:
        return ""
    try:
        return checks.check_path("workdir", path).decode()
    except UnicodeDecodeError:
        checks.refuse("workdir", "is not UTF-8")


@dataclass(frozen=True, slots=True, eq=False)
class Creation:
    _parts: Parts
    _registry: Registry
    _lifecycle: Lifecycle
    resolve_image: ResolveImage
    _pool: Pool
    _quotas: Quotas
    _builder: Builder

    @property
    def default_limits(self) -> Limits:
        """The limits of a session whose request has none."""
        given = self._parts.settings.limits
        return Limits(cpus=given.cpus, memory=given.memory, pids=given.pids, disk=given.disk)

    async def make(self, caller: Caller, spec: SessionSpec, *, fleeting: bool = False) -> Live:
        began = self._parts.clock.monotonic()
        checks.check_caller(caller)
        env = checks.check_session(spec)
        check_entries(spec.manifest)
        spec = replace(spec, shape=check_shape(caller, spec.shape))
        digest = await self.resolve_image(caller.uid, choose_tenant(caller, spec.tenant), spec.image)
        hosts = await self._choose_hosts(caller, spec)
        found = await find_runtime(self._parts, spec.runtime)
        session = self._describe(caller, spec, found, hosts)
        checks.check_memory(found.runtime, session.limits)
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
        """Has a registered session built; one that cannot be built is ended."""
        building = self._lifecycle.begin(live, self._builder.build(live, caller, manifest, claimed))
        try:
            await wait_done(building)
        except asyncio.CancelledError:
            self._lifecycle.end(live, ABANDONED)
            raise
        await self._check_built(live, building)

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
        # A caller with a project in it works there, and is back soon.
        usual = usual and (template.shape == PLAIN or bool(template.shape.slots))
        return await self._pool.claim(template, usual=usual)

    def register(self, live: Live, claimed: Claimed | None = None) -> None:
        try:
            self._registry.check_name(live)  # before it counts as a creation
            self._quotas.check_session(live)
            self._registry.add(live)
        except Fault:
            if claimed:
                self._pool.put_back(claimed)
            raise

    def _describe(self, caller: Caller, spec: SessionSpec, runtime: RuntimeReport, hosts: HostList) -> Session:
        return Session(
            session_id=spec.session_id or make_id(),
            tenant=choose_tenant(caller, spec.tenant),
            owner=caller.uid,
            phase=Phase.CREATING,
            runtime=runtime.runtime,
            emulated=runtime.emulated,
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
            workdir=_check_workdir(spec.workdir),
        )

    async def _check_built(self, live: Live, building: asyncio.Task[None]) -> None:
        if building.cancelled() or live.ending is not None:
            raise Fault(
                Kind.CONFLICT,
                "session_destroyed",
                f"session {live.session_id} was destroyed meanwhile",
                hint="Create it again.",
            )
        error = building.exception()
        if error is None:
            return
        if not live.stored:
            self._registry.remove(live)
        else:
            await wait_done(self._lifecycle.end(live, ABANDONED))
        raise error

    def prewarm(self) -> None:
        """Makes warm sandboxes from the daemon's start on, where the settings say so."""
        if self._pool.settings.prewarm:
            self._parts.tasks.spawn(self._prewarm())

    async def _prewarm(self) -> None:
        self._pool.keep(Template(await choose_runtime(self._parts, None), limits=self.default_limits))
