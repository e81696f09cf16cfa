"""The list of hosts of a session: changed while the session lives, put back in force after a crash.

The list stands in two places, the session's record and the kernel. The record is written first, always, and the kernel
follows in one step, so that

- no caller is told that a list is in force before both have it;
- after a crash in between, the kernel has the old list and the record the new one. While there is no daemon nothing
  changes, so nothing opens; the next daemon puts the record's list in force before it serves callers. Thus what was
  asked for is finished, and a revocation that reached the record is never forgotten. The other way round a crash could
  undo one that had already cut connections;
- when the kernel refuses, the old list is in force, and the record is set back to it.

One exception, to fail closed: when the record cannot be written (a full disk) and the new list opens nothing that was
closed, the kernel gets it all the same, the caller is told that it is not on record yet, and the upkeep writes it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from k8e.core.checks import check_hosts, refuse
from k8e.core.egress.ceiling import check_ceiling
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Caller, HostsChange, Phase, Session
from k8e.core.parts import Parts
from k8e.core.sessions.children import check_reach
from k8e.core.sessions.ends import UNBOUND, describe_loss, describe_unusable
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Registry, Sessions
from k8e.core.tasks import wait_done
from k8e.core.translation import translate
from k8e.engine import EngineError
from k8e.policy import HostList, InvalidEntry, common, excess


def apply_change(old: HostList, change: HostsChange) -> HostList:
    """Pure. To remove an entry that is not there is an error: that caller believes in another list than this one."""
    if change.hosts is not None:
        if change.add or change.remove:
            refuse("hosts", "replaces the whole list and cannot be given together with add or remove")
        return check_hosts("hosts", change.hosts)
    add, remove = check_hosts("add", change.add), check_hosts("remove", change.remove)
    for entry in remove.entries:
        if entry in add.entries:
            refuse("remove", f"{entry} is also to be added")
        if entry not in old.entries:
            hint = f"On it are: {', '.join(old.texts)}." if old.entries else "It is empty."
            refuse("remove", f"{entry} is not on the list", hint)
    try:
        return old.minus(remove).plus(add)
    except InvalidEntry as error:
        refuse("add", error.cause, error.hint)


@dataclass(frozen=True, slots=True, eq=False)
class Hosts:
    _parts: Parts
    _sessions: Sessions
    _registry: Registry
    _lifecycle: Lifecycle

    async def change(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        live = self._sessions.find(caller, session_id)
        await self._parts.tasks.finish(self._change(live, caller, change))
        return live.show()

    async def _change(self, live: Live, caller: Caller, change: HostsChange) -> None:
        with live.in_use():
            async with AsyncExitStack() as stack:
                for member in (live.parent, live):  # always in this order
                    if member is not None:
                        await stack.enter_async_context(member.hosts.changing)
                if not live.usable:
                    raise describe_unusable(live)
                old = live.session.hosts
                new = apply_change(old, change)
                if new != old:
                    field = "add" if change.hosts is None else "hosts"
                    await check_ceiling(self._parts, caller, field, new, old)
                    if live.parent is not None:
                        check_reach(field, new, live.parent.session)
                    await self._log(live, caller, old, new)
                    await asyncio.gather(*(self._narrow(child, new) for child in live.children))
                    await self._replace(live, old, new)
                    self._parts.audit.note("hosts_changed", **live.identity, after=new.texts)
                    note("hosts_changed", session=live.session_id, sandbox=live.sandbox, entries=len(new.entries))

    async def _log(self, live: Live, caller: Caller, old: HostList, new: HostList) -> None:
        facts = {**live.identity, "caller": caller.label, "before": old.texts, "after": new.texts}
        if excess(new, old):
            await self._parts.audit.record("hosts_changing", **facts)
        else:  # an audit log that cannot be written must not keep a list open
            self._parts.audit.note("hosts_changing", **facts)

    async def _narrow(self, child: Live, limit: HostList) -> None:
        """Takes off a child's list what its parent's will not have any more. A child with which that is not possible is
        ended: it neither keeps what is revoked nor prevents the revocation."""
        async with child.hosts.changing:
            old = child.session.hosts
            if child.ending is not None or not excess(old, limit):
                return
            new = common(old, limit)
            self._parts.audit.note("hosts_narrowed", **child.identity, before=old.texts, after=new.texts)
            if child.phase is Phase.CREATING:  # nothing runs in it yet; it is put in force before something does
                child.set_hosts(new)
                await self._write_back(child, new)
                return
            try:
                await self._replace(child, old, new)
            except Fault as fault:
                if child.session.hosts != new and child.usable:
                    warn("hosts_not_narrowed", session=child.session_id, sandbox=child.sandbox, cause=fault)
                    await wait_done(self._lifecycle.end(child, UNBOUND))

    async def _replace(self, live: Live, old: HostList, new: HostList) -> None:
        unwritten = await self._write(live, new, narrows=not excess(new, old))
        try:
            await self._parts.engine.set_egress(live.sandbox, new)
        except EngineError as error:
            await self._sessions.examine(live)
            if not live.usable:
                raise describe_loss(live) from error
            if unwritten is None:
                await self._write_back(live, old)
            raise translate(error, "changing what the session may reach") from error
        live.set_hosts(new)
        live.hosts.unsaved = unwritten is not None
        if unwritten is not None:
            raise Fault(
                Kind.UNAVAILABLE,
                "hosts_not_recorded",
                "the list is in force but could not be written down",
                detail=unwritten.detail,
                hint="It is tried again. Should the daemon end before that, the old list comes back with the next one.",
            ) from unwritten

    async def _write(self, live: Live, hosts: HostList, *, narrows: bool) -> Fault | None:
        try:
            await self._parts.store.set_hosts(live.sandbox, hosts)
        except Fault as fault:
            if not narrows:
                raise
            return fault
        return None

    async def _write_back(self, live: Live, hosts: HostList) -> None:
        try:
            await self._parts.store.set_hosts(live.sandbox, hosts)
        except Fault as fault:
            live.hosts.unsaved = True
            warn("hosts_not_written", session=live.session_id, sandbox=live.sandbox, detail=fault.detail)

    async def restore(self, live: Live) -> None:
        """Puts the list on record in force instead of the kernel's: for a session that an earlier daemon left. A
        child's list is cut to its parent's, in case that daemon did not come to it."""
        if live.parent is not None and excess(live.session.hosts, live.parent.session.hosts):
            live.set_hosts(common(live.session.hosts, live.parent.session.hosts))
            await self._write_back(live, live.session.hosts)
        try:
            await self._parts.engine.set_egress(live.sandbox, live.session.hosts)
        except EngineError as error:
            raise translate(error, "putting the session's list of hosts in force") from error

    async def save(self) -> None:
        """Writes down what could not be written."""
        for live in self._registry:
            if live.hosts.unsaved:
                async with live.hosts.changing:
                    await self._parts.store.set_hosts(live.sandbox, live.session.hosts)
                    live.hosts.unsaved = False
