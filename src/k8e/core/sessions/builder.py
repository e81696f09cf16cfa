"""Makes the sandbox of a new session, or makes a warm one the session's, and fills it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from k8e.core.access.access import find_payer
from k8e.core.access.turns import Turns
from k8e.core.errors import Fault
from k8e.core.model import Caller, Denials, ManifestEntry, Phase
from k8e.core.parts import Parts
from k8e.core.pool.pool import Claimed, Pool
from k8e.core.sandbox.environment import keep_env, prepare_state
from k8e.core.sandbox.manifest import apply_manifest, make_workdir
from k8e.core.sessions.interpreters import Interpreters, waits_for_mounts
from k8e.core.sessions.lifetimes import allow_life
from k8e.core.sessions.live import Live
from k8e.core.sessions.phases import Event
from k8e.core.sessions.sessions import Observer, Registry
from k8e.core.store.records import SessionRecord
from k8e.core.translation import translate, translated
from k8e.engine import EngineError, MountRefused, Place, SandboxSpec
from k8e.link.model import Sandbox

# At once, of all payers together. A build waits for the kernel now and then, so a few more than processors keep those
# busy; with more, all of them are slow, and none is ready before the others.
_BUILDS: Final = max(4, 3 * (os.cpu_count() or 1))


def describe_sandbox(record: SessionRecord) -> SandboxSpec:
    """The sandbox of a session, when it is made and whenever it is started again."""
    session = record.session
    what = session.runtime, record.digest, session.limits
    shares, life = record.parent_sandbox, allow_life(session)
    tenant = find_payer(session.owner, session.tenant).tenant
    return SandboxSpec(*what, egress=session.hosts, shape=session.shape, shares=shares, life=life, tenant=tenant)


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    _parts: Parts
    _registry: Registry
    _observer: Observer
    _pool: Pool
    _interpreters: Interpreters
    builds: Turns = field(default_factory=lambda: Turns(_BUILDS))

    async def build(
        self, live: Live, caller: Caller, manifest: Sequence[ManifestEntry], claimed: Claimed | None
    ) -> None:
        made_with = live.session.hosts
        sandbox, place = await (self._bind(live, claimed) if claimed else self._make(live))
        await keep_env(sandbox, live.env)
        await self._keep_env(live)
        await self._furnish(live, sandbox, place, manifest)
        await make_workdir(sandbox, place, live.session.workdir)
        await self._log_creation(live, caller)
        async with live.hosts.changing:
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
            await self._parts.environments.keep(live.sandbox, plain)

    async def _make(self, live: Live) -> tuple[Sandbox, Place]:
        await self._parts.store.insert_session(live.record)
        live.mark_stored()
        async with self.builds.take(live.payer):
            return await self._make_sandbox(live)

    async def _make_sandbox(self, live: Live) -> tuple[Sandbox, Place]:
        with translated("creating the sandbox"):
            await self._parts.engine.create(live.sandbox, describe_sandbox(live.record))
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
        live.mark_stored()
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
        """With one that is made for it: directories that could not be mounted late may be there from the beginning."""
        with translated("removing a sandbox that is of no use"):
            await self._parts.engine.destroy(live.sandbox)
        async with self.builds.take(live.payer):
            return await self._make_sandbox(live)

    async def _furnish(self, live: Live, sandbox: Sandbox, place: Place, entries: Sequence[ManifestEntry]) -> None:
        if not entries:
            return
        await self._observer.observe(live)
        mark = live.refusals.mark()
        try:
            await apply_manifest(sandbox, place, live.env, entries)
        except Fault as fault:
            await self._observer.observe(live)
            raise _explain(fault, live.refusals.since(mark, "")) from fault.__cause__

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


def _explain(fault: Fault, denied: Denials) -> Fault:
    """The fault of a session that could not be created, with the denials that may be its cause. Their hints name no
    session, because there is none."""
    if not denied.entries:
        return fault
    last = denied.entries[-1]
    detail = f"the network was refused: {last.host or last.address} ({last.reason}); {fault.detail}"
    explained = Fault(
        fault.kind, fault.code, fault.error, detail=detail, hint=last.hint, field=fault.field, denied=denied
    )
    return explained.with_traceback(fault.__traceback__)
