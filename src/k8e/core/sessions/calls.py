"""The calls of doors about sessions, each answered by the part that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from k8e.core.checks import check_caller
from k8e.core.log.audit import call
from k8e.core.model import Caller, ChildSpec, HostsChange, Session, SessionSpec
from k8e.core.parts import Parts
from k8e.core.sessions.children import Children
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.hosts import Hosts
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.persistence import Persistence
from k8e.core.sessions.sessions import Observer, Registry, Sessions


@dataclass(frozen=True, slots=True, eq=False)
class SessionCalls:
    """Implements `contract.SessionService`."""

    _parts: Parts
    _sessions: Sessions
    _registry: Registry
    _lifecycle: Lifecycle
    _observer: Observer
    _creation: Creation
    _children: Children
    _persistence: Persistence
    _hosts: Hosts

    @call("create")
    async def create(self, caller: Caller, spec: SessionSpec) -> Session:
        return (await self._creation.make(caller, spec)).show()

    @call("subagent")
    async def create_child(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        return await self._children.create(caller, parent_session_id, spec)

    @call("get")
    async def get(self, caller: Caller, session_id: str) -> Session:
        live = self._sessions.find(caller, session_id)
        if live.usable:
            await self._observer.observe(live)
        return replace(live.show(), denied=live.refusals.recent(live.session_id))

    @call("sessions")
    async def list(self, caller: Caller, *, all_phases: bool = False) -> Sequence[Session]:
        check_caller(caller)
        visible = self._registry.visible(caller)
        if not all_phases:
            return [live.show() for live in visible if live.there]
        living = [live.show() for live in visible]
        ended = await self._parts.store.ended_sessions(caller)
        return [*(record.session for record in ended), *living]

    @call("destroy")
    async def destroy(self, caller: Caller, session_id: str) -> None:
        await self._lifecycle.destroy(self._sessions.find(caller, session_id), caller.label)

    @call("stop_session")
    async def stop(self, caller: Caller, session_id: str) -> Session:
        return await self._persistence.stop(caller, session_id)

    @call("start_session")
    async def start(
        self,
        caller: Caller,
        session_id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        return await self._persistence.start(caller, session_id, env or {}, secrets or {})

    @call("set_hosts")
    async def set_hosts(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        return await self._hosts.change(caller, session_id, change)
