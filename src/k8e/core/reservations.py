"""Sandboxes that a caller wants ready: so many that can become such a session, for as long as this daemon lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from k8e.core import checks
from k8e.core.access.access import choose_tenant
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.model import Caller, PoolStatus, Reservation, SessionSpec
from k8e.core.parts import Parts
from k8e.core.pool.demand import Template
from k8e.core.pool.pool import Pool
from k8e.core.sessions.creation import Creation, choose_runtime
from k8e.core.sessions.mounts import check_slots
from k8e.core.translation import translated

MAX_RESERVED: Final = 100  # of one kind
MAX_RESERVATIONS: Final = 16  # of one caller


class Reservations:
    """Implements `contract.WarmService`."""

    def __init__(self, parts: Parts, pool: Pool, creation: Creation) -> None:
        self._parts = parts
        self._pool = pool
        self._creation = creation
        self._images: dict[str, str] = {}  # by reservation, as the caller named them

    @call("reserve")
    async def reserve(self, caller: Caller, name: str, spec: SessionSpec, number: int) -> PoolStatus:
        checks.check_caller(caller)
        checks.check_name("name", name)
        checks.check_session(spec)
        if not 0 <= number <= MAX_RESERVED:
            checks.refuse("count", f"must be 0 to {MAX_RESERVED}")
        check_slots(caller, spec.shape)
        if not self._pool.settings.enabled:
            hint = "the administrator decides: [pool] enabled in k8e.toml"
            raise Fault(Kind.UNAVAILABLE, "pool_disabled", "no sandboxes are made ahead on this machine", hint=hint)
        names = {each.name for each in self._list(caller)}
        if number and len(names - {name}) >= MAX_RESERVATIONS:
            error = f"there are {MAX_RESERVATIONS} reservations already"
            raise Fault(Kind.EXHAUSTED, "too_many_reservations", error, hint="set the count of one of them to 0")
        template = await self._choose_template(caller, spec)
        self._images[f"{caller.label}/{name}"] = spec.image
        if number:
            with translated("making sandboxes ahead"):
                await self._parts.engine.edition(template.spec)  # the caller hears now what would fail later
        self._pool.reserve(f"{caller.label}/{name}", template, number)
        return await self.status(caller)

    @call("pool")
    async def status(self, caller: Caller) -> PoolStatus:
        checks.check_caller(caller)
        settings = self._pool.settings
        return PoolStatus(settings.enabled, settings.max, self._pool.warm, self._list(caller))

    async def _choose_template(self, caller: Caller, spec: SessionSpec) -> Template:
        runtime = await choose_runtime(self._parts, spec.runtime)
        digest = await self._creation.resolve_image(caller.uid, choose_tenant(caller, spec.tenant), spec.image)
        template = Template(runtime, digest, spec.limits or self._creation.default_limits, spec.shape)
        checks.check_memory(runtime, template.limits)
        return template

    def _list(self, caller: Caller) -> Sequence[Reservation]:
        """The caller's own."""
        own = f"{caller.label}/"
        return [
            replace(each, name=name.removeprefix(own), image=self._images[name])
            for name, each in self._pool.reservations().items()
            if name.startswith(own)
        ]
