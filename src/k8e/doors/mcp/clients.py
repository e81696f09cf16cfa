"""One client of the protocol: its caller, its default session, and what ends with its connection.

A client sees the sessions of its own tenant and no others, also when its user is root. The tenant is a random name,
unless the connection was opened for a named tenant, which keeps its sessions.
"""

from __future__ import annotations

import asyncio
import enum
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from k8e.core.access.access import PART
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, ChildSpec, Session, SessionSpec
from k8e.doors.mcp.resources import OutputResources

if TYPE_CHECKING:
    from k8e.doors.mcp.handles import Handles

SECRET: Final = re.compile(r"mcp-[0-9a-f]{32}")  # a connection's tenant, or a part of a key's; cannot be guessed
CHILD: Final = re.compile(rf"({SECRET.pattern})-[0-9a-f]{{8}}")  # of a stateless client's session
USERS: Final = "default"  # the tenant of the command line
TTL: Final = 900.0  # of a stateless client's session
_RESTARTED: Final = "The daemon was restarted, and the sessions of this connection ended with it"
_GONE: Final = ("session_not_found", "session_destroying")  # nothing has run

T = TypeVar("T")


class Finding(enum.Enum):
    """How a later call finds the session of an earlier one."""

    CONNECTION = enum.auto()  # both came on one connection
    TENANT = enum.auto()  # it is the session of a named tenant
    HANDLE = enum.auto()  # it names the session


def make_secret_name() -> str:
    return f"mcp-{secrets.token_hex(16)}"


class McpClient:
    def __init__(self, service: WholeService, caller: Caller, tenant: str = "", *, known: bool) -> None:
        """`known`: the kernel reported the client's user. Then the client may name other tenants of the same user, and
        answers that were given in its dialogue count as that user's. A client with an API key may name the key's
        tenants."""
        self.service = service
        self._prefix = f"{caller.tenant}{PART}" if caller.tenant else ""
        self._tenants: tuple[str, ...] = (caller.tenant, *caller.tenants) if caller.tenant else ()
        self.caller = replace(caller, tenant=tenant or self._prefix + make_secret_name(), tenants=(), confined=True)
        self.outputs = OutputResources()
        self.kept = ""  # the tenant of sandboxes that are made by name; empty: the client's own
        self.known = known
        self.finding = Finding.TENANT if tenant else Finding.CONNECTION
        self.restarted = False  # the client was connected to an earlier daemon before
        self._notes: list[str] = []
        self._default = ""
        self._choosing = asyncio.Lock()

    @property
    def default(self) -> str | None:
        return self._default or None

    @property
    def _own(self) -> str:
        return self.caller.tenant

    @property
    def _keeps_sessions(self) -> bool:
        return self.finding is Finding.TENANT

    def take_notes(self) -> list[str]:
        """The notes for the answer to this call, each of them once."""
        notes, self._notes = self._notes, []
        return notes

    def note_restart(self) -> None:
        """The bridge has connected again: the daemon that it was connected to before has ended."""
        self.restarted = True
        if not self._keeps_sessions:
            self._notes.append(f"{_RESTARTED}. Files of earlier calls are gone.")

    def explain(self, fault: Fault) -> str:
        """A hint that this client needs instead of the usual one; or empty."""
        if fault.code != "session_not_found":
            return ""
        if self.restarted and not self._keeps_sessions:
            return f"{_RESTARTED}. Leave the session out to get a new one."
        return ""

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        """Calls `work` with the named session, or with the default one. If the default session has ended, `work` is
        called again with a new one, because it did nothing in the old one."""
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
                self._default = await self._find_latest(gone) or (await self._make_default()).session_id
            return self._default

    async def _find_latest(self, gone: str) -> str:
        """The session of a named tenant that was used last, by any client."""
        if not self._keeps_sessions:
            return ""
        sessions = await self.service.sessions.list(self.caller)
        own = [each for each in sessions if each.tenant == self._own and each.session_id != gone and not each.parent]
        return max(own, key=lambda each: each.last_used).session_id if own else ""

    async def _make_default(self) -> Session:
        return await self.service.sessions.create(self.caller, SessionSpec())

    async def create(self, spec: SessionSpec) -> Session:
        foreign = spec.tenant not in ("", self._own, *self.caller.tenants)
        if foreign and (self.known or spec.tenant in self._tenants):
            caller = replace(self.caller, tenants=(*self.caller.tenants, spec.tenant))
            session = await self.service.sessions.create(caller, spec)
            self.caller = caller
            return session
        return await self.service.sessions.create(self.caller, spec)

    async def create_child(self, named: str, spec: ChildSpec) -> Session:
        async def create(parent: str) -> Session:
            return await self.service.sessions.create_child(self.caller, parent, self._name_child(parent, spec))

        return await self.use(named, create)

    def _name_child(self, parent: str, spec: ChildSpec) -> ChildSpec:
        return spec

    async def destroy(self, session_id: str) -> None:
        await self.service.sessions.destroy(self.caller, session_id)
        if session_id == self._default:
            self._default = ""

    async def sessions(self) -> list[Session]:
        return list(await self.service.sessions.list(self.caller))

    async def close(self) -> None:
        """Ends what ends with the connection."""
        self.outputs.close()
        if not self._keeps_sessions:
            await destroy_all(self.service, self.caller, self._own)


class KeepingClient(McpClient):
    """A client of a toolset that keeps sandboxes by name for their user. It sees these beside its own, and nothing else
    of the user's tenant."""

    def __init__(self, service: WholeService, caller: Caller, tenant: str, toolset: str) -> None:
        super().__init__(service, caller, tenant, known=True)
        self._toolset = toolset
        self.kept = tenant or USERS
        self.caller = replace(self.caller, tenants=(self.kept,))

    def note_restart(self) -> None:
        """Its sandboxes are there as before."""

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        if named:
            await self._check_visible(named)
        return await super().use(named, work)

    async def destroy(self, session_id: str) -> None:
        await self._check_visible(session_id)
        await super().destroy(session_id)

    async def sessions(self) -> list[Session]:
        return [each for each in await super().sessions() if self._sees(each)]

    async def _check_visible(self, name: str) -> None:
        if not self._sees(await self.service.sessions.get(self.caller, name)):
            hint = "sandbox_list lists those that are yours."
            raise Fault(Kind.NOT_FOUND, "session_not_found", f"there is no session {name}", hint=hint)

    def _sees(self, session: Session) -> bool:
        return session.tenant == self._own or session.labels.get("front") == self._toolset


class StatelessClient(McpClient):
    """The client of a single request, in protocol versions without connections. A later request finds a session by its
    name alone, so the name is a secret: a client can neither choose one nor list sessions."""

    def __init__(self, service: WholeService, caller: Caller, handles: Handles, outputs: OutputResources) -> None:
        super().__init__(service, caller, known=False)
        self.finding = Finding.HANDLE
        self.outputs = outputs
        self._tenants = ()
        self._handles = handles
        self._made: list[str] = []  # tenants

    async def use(self, named: str, work: Callable[[str], Awaitable[T]]) -> T:
        self._enter(named)
        return await super().use(named, work)

    def explain(self, fault: Fault) -> str:
        if fault.code == "session_not_found":
            return "It has ended, or this is no session_id of an earlier answer. Leave it out to get a new session."
        return super().explain(fault)

    async def create(self, spec: SessionSpec) -> Session:
        if spec.session_id:
            raise Fault(
                Kind.DENIED,
                "session_id_chosen",
                "without a connection, a session's name is what keeps others out of it and cannot be chosen",
                hint="Leave session_id out, and use the one in the answer.",
                field="session_id",
            )
        name = make_secret_name()
        self._enter(name)
        self._handles.add(self.caller)
        self._made.append(self._own)
        try:
            return await super().create(replace(spec, session_id=name, ttl=TTL))
        except Fault:
            self._handles.drop(self._own)
            raise

    def _enter(self, name: str) -> None:
        """The tenant of such a session has the session's name."""
        if match := CHILD.fullmatch(name):
            name = match[1]
        if SECRET.fullmatch(name):
            self.caller = replace(self.caller, tenant=self._prefix + name)
            self._handles.use(self._own)

    def _name_child(self, parent: str, spec: ChildSpec) -> ChildSpec:
        return replace(spec, session_id=f"{parent}-{secrets.token_hex(4)}")

    async def _make_default(self) -> Session:
        session = await self.create(SessionSpec())
        self._notes.append(
            f"This call has made a new session. Give session_id {session.session_id} to later calls: they find its "
            "files and packages by it. Without a later call it ends within minutes."
        )
        return session

    async def destroy(self, session_id: str) -> None:
        self._enter(session_id)
        await super().destroy(session_id)

    def leave(self, *, answered: bool) -> None:
        """The request has ended. Its sessions stay for the next one, if the client knows their names."""
        for tenant in self._made:
            if answered:
                self._handles.keep(tenant)
            else:
                self._handles.drop(tenant)


async def destroy_all(service: WholeService, caller: Caller, tenant: str) -> None:
    sessions = [each for each in await service.sessions.list(caller) if each.tenant == tenant]
    await asyncio.gather(*(_destroy(service, caller, each.session_id) for each in sessions))


async def _destroy(service: WholeService, caller: Caller, session_id: str) -> None:
    try:
        await service.sessions.destroy(caller, session_id)
    except Fault as fault:
        if fault.code not in _GONE:
            raise


async def reclaim(service: WholeService, *, handles: bool = True) -> None:
    """Destroys the sessions of connections to an earlier daemon: no client can find them again. `handles`: also those
    of clients without connections, which find theirs by its name; else core ends them when they are not used."""
    sessions = await service.sessions.list(Caller(0))
    for each in sessions:
        part = each.tenant.rpartition(PART)[2]
        by_name = each.session_id == part or CHILD.fullmatch(each.session_id) is not None
        if SECRET.fullmatch(part) and (handles or not by_name):
            await _destroy(service, Caller(each.owner, each.tenant, confined=True), each.session_id)
