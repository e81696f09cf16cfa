"""The calls of doors about sessions, each answered by the part that does it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from k8e.core.checks import check_caller
from k8e.core.log.audit import call
from k8e.core.model import Caller, ChildSpec, HostsChange, Load, Session, SessionSpec
from k8e.core.parts import Parts
from k8e.core.sessions.children import Children
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.hosts import Hosts
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.persistence import Persistence
from k8e.core.sessions.sessions import Observer, Registry, Sessions
from k8e.engine import EngineError
from k8e.link.errors import LinkError

_AT_ONCE: Final = 8  # sandboxes that are asked for their load
_SOON: Final = 2.0


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
    async def list(self, caller: Caller, *, all_phases: bool = False, loads: bool = False) -> Sequence[Session]:
        check_caller(caller)
        visible = [live for live in self._registry.visible(caller) if live.there or all_phases]
        living = await self._list_loads(visible) if loads else [live.show() for live in visible]
        if not all_phases:
            return living
        ended = await self._parts.store.ended_sessions(caller)
        return [*(record.session for record in ended), *living]

    async def _list_loads(self, lives: Sequence[Live]) -> Sequence[Session]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def show(live: Live) -> Session:
            if not live.usable:
                return live.show()
            async with turns:
                return replace(live.show(), load=await self._measure(live))

        return await asyncio.gather(*map(show, lives))

    async def _measure(self, live: Live) -> Load | None:
        try:
            async with asyncio.timeout(_SOON):
                await self._observer.observe(live)
                usage = await self._parts.engine.measure(live.sandbox)
                sandbox, _ = await self._parts.engine.attach(live.sandbox)
                commands = sum(command.running for command in await sandbox.commands())
        except (EngineError, LinkError, TimeoutError):
            return None
        denied = live.refusals.recent(live.session_id)
        return Load(usage.cpu_seconds, usage.memory, commands, len(denied.entries) + denied.more)

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
