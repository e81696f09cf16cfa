"""One agent's connection: who it is to the service, which session it means when it names none, and what ends with it.

The service lets a guest see its own tenant and no other, root's guests included. The tenant is a name that nobody else
knows, unless the connection was opened for one that keeps its sessions.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from k8e.core.access.access import PART
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, ChildSpec, Session, SessionSpec
from k8e.doors.mcp.outputs import Outputs

PASSING: Final = re.compile(r"mcp-[0-9a-f]{32}")  # tenants of connections, and parts of a key's; nobody guesses one
CHILD: Final = re.compile(rf"({PASSING.pattern})-[0-9a-f]{{8}}")  # of a session that only its own name leads to
USERS: Final = "default"  # where the command line has a user's sandboxes
HANDLE_TTL: Final = 900.0  # a session that only its own name leads to
_GONE: Final = ("session_not_found", "session_destroying")  # nothing has run

T = TypeVar("T")


Service = WholeService  # what agents call


def invent_name() -> str:
    return f"mcp-{secrets.token_hex(16)}"


class Guest:
    def __init__(self, service: Service, caller: Caller, tenant: str = "", *, known: bool) -> None:
        """`known`: the kernel says who it is. Then it may use the same user's other tenants by naming them, and bring
        what that user answered in its dialogue. Who comes with a key is a part of its tenant, and may name its tenants.
        """
        self.service = service
        self._within = f"{caller.tenant}{PART}" if caller.tenant else ""
        self._reach: tuple[str, ...] = (caller.tenant, *caller.tenants) if caller.tenant else ()
        self.caller = replace(caller, tenant=tenant or self._within + invent_name(), tenants=(), confined=True)
        self.outputs: Outputs | None = Outputs()
        self.kept = ""  # the tenant of what is made by name; empty: the same
        self._kept = bool(tenant)
        self.known = known
        self._default = ""
        self._choosing = asyncio.Lock()
        self._abandoned: set[asyncio.Task[None]] = set()

    @property
    def default(self) -> str | None:
        return self._default or None

    @property
    def _own(self) -> str:
        return self.caller.tenant

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        """Does something in a session: the one that was named, else the default one. If that is gone there is a new
        one, in silence, since nothing was done in the old."""
        if named:
            return await work(named)
        session = await self._choose("")
        try:
            return await work(session)
        except Fault as fault:
            if fault.code not in _GONE:
                raise
        return await work(await self._choose(session))

    async def _choose(self, gone: str) -> str:
        async with self._choosing:
            if self._default in ("", gone):
                self._default = ""
                self._default = await self._find(gone) or (await self._make_default()).session_id
            return self._default

    async def _find(self, gone: str) -> str:
        """A tenant's session that was used last, whoever made it."""
        if not self._kept:
            return ""
        sessions = await self.service.sessions.list(self.caller)
        own = [each for each in sessions if each.tenant == self._own and each.session_id != gone and not each.parent]
        return max(own, key=lambda each: each.last_used).session_id if own else ""

    async def _make_default(self) -> Session:
        return await self.service.sessions.create(self.caller, SessionSpec())

    async def create(self, spec: SessionSpec) -> Session:
        foreign = spec.tenant not in ("", self._own, *self.caller.tenants)
        if foreign and (self.known or spec.tenant in self._reach):
            caller = replace(self.caller, tenants=(*self.caller.tenants, spec.tenant))
            session = await self.service.sessions.create(caller, spec)
            self.caller = caller
            return session
        return await self.service.sessions.create(self.caller, spec)

    async def run_subagent(self, named: str, spec: ChildSpec) -> Session:
        async def make(parent: str) -> Session:
            return await self.service.sessions.create_child(self.caller, parent, self._name_child(parent, spec))

        return await self.use(named, make)

    def _name_child(self, parent: str, spec: ChildSpec) -> ChildSpec:
        return spec

    async def destroy(self, session_id: str) -> None:
        await self.service.sessions.destroy(self.caller, session_id)
        if session_id == self._default:
            self._default = ""

    def abandon(self, session_id: str) -> None:
        """Destroys it while nobody waits, also for a caller who is just being cancelled."""
        task = asyncio.create_task(_destroy(self.service, self.caller, session_id))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def sessions(self) -> list[Session]:
        return list(await self.service.sessions.list(self.caller))

    async def leave(self) -> None:
        """The connection has ended."""
        if self.outputs is not None:
            self.outputs.close()
        await asyncio.gather(*self._abandoned, return_exceptions=True)
        if not self._kept:
            await destroy_all(self.service, self.caller, self._own)


class KeepingGuest(Guest):
    """An agent of a front that keeps sandboxes by name for their user. It sees those beside its own, and nothing else
    that its user has in the same tenant."""

    def __init__(self, service: Service, caller: Caller, tenant: str, front: str) -> None:
        super().__init__(service, caller, tenant, known=True)
        self._front = front
        self.kept = tenant or USERS
        self.caller = replace(self.caller, tenants=(self.kept,))

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        if named:
            await self._look_for(named)
        return await super().use(named, work)

    async def destroy(self, session_id: str) -> None:
        await self._look_for(session_id)
        await super().destroy(session_id)

    async def sessions(self) -> list[Session]:
        return [each for each in await super().sessions() if self._shows(each)]

    async def _look_for(self, name: str) -> None:
        if not self._shows(await self.service.sessions.get(self.caller, name)):
            hint = "sandbox_list lists those that are yours."
            raise Fault(Kind.NOT_FOUND, "session_not_found", f"there is no session {name}", hint=hint)

    def _shows(self, session: Session) -> bool:
        return session.tenant == self._own or session.labels.get("front") == self._front


class PassingGuest(Guest):
    """A single call, as in protocols without connections: what is to be found again has to be named. The name of a
    session is a secret that leads to this one session, which is why nobody can choose it or list any."""

    def __init__(self, service: Service, caller: Caller, remember: Callable[[str], None]) -> None:
        super().__init__(service, caller, known=False)
        self.outputs = None
        self._reach = ()
        self._remember = remember

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        self._enter(named)
        return await super().use(named, work)

    async def create(self, spec: SessionSpec) -> Session:
        if spec.session_id:
            raise Fault(
                Kind.DENIED,
                "session_id_chosen",
                "without a connection, a session's name is what keeps others out of it and cannot be chosen",
                hint="Leave session_id out, and use the one in the answer.",
                field="session_id",
            )
        name = invent_name()
        self._enter(name)
        self._remember(self.caller.tenant)
        return await super().create(replace(spec, session_id=name, ttl=HANDLE_TTL))

    def _enter(self, name: str) -> None:
        if match := CHILD.fullmatch(name):
            name = match[1]
        if PASSING.fullmatch(name):
            self.caller = replace(self.caller, tenant=self._within + name)

    def _name_child(self, parent: str, spec: ChildSpec) -> ChildSpec:
        """So that its name leads to it, too."""
        return replace(spec, session_id=f"{parent}-{secrets.token_hex(4)}")

    async def _make_default(self) -> Session:
        return await self.create(SessionSpec())

    async def destroy(self, session_id: str) -> None:
        self._enter(session_id)
        await super().destroy(session_id)

    async def leave(self) -> None:
        """Its sessions wait for the next call."""
        await asyncio.gather(*self._abandoned, return_exceptions=True)


async def destroy_all(service: Service, caller: Caller, tenant: str) -> None:
    sessions = [each for each in await service.sessions.list(caller) if each.tenant == tenant]
    await asyncio.gather(*(_destroy(service, caller, each.session_id) for each in sessions))


async def _destroy(service: Service, caller: Caller, session_id: str) -> None:
    try:
        await service.sessions.destroy(caller, session_id)
    except Fault as fault:
        if fault.code not in _GONE:
            raise


async def reclaim(service: Service) -> None:
    """What connections to an earlier daemon have left: nobody can come back to it."""
    root = Caller(0)
    left = [each for each in await service.sessions.list(root) if PASSING.fullmatch(each.tenant.rpartition(PART)[2])]
    for each in left:
        caller = Caller(each.owner, each.tenant, confined=True)
        await _destroy(service, caller, each.session_id)
