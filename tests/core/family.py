"""A parent with sub-agents, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

from k8e.core.model import Caller, ChildSpec, HostsChange
from k8e.policy import HostList
from tests.core.rig import ALICE, Rig

PARENT = "parent"
HOSTS = ("a.test", "*.b.test", "192.0.2.0/24")


async def make_child(rig: Rig, session_id: str = "", caller: Caller = ALICE, **wishes: Any) -> str:
    spec = ChildSpec(session_id=session_id, **wishes)
    return (await rig.service.sessions.create_child(caller, PARENT, spec)).session_id


async def check_hosts(rig: Rig, session: str, *hosts: str) -> None:
    """What is shown, on record and in force."""
    assert (await rig.service.sessions.get(ALICE, session)).hosts == HostList.parse(hosts)
    sandbox = rig.sandbox_of(session)
    record = await rig.store.find_session(sandbox)
    assert record is not None
    assert record.session.hosts.texts == rig.engine.egress(sandbox) == HostList.parse(hosts).texts


async def read_audit(rig: Rig, event: str) -> list[dict[str, Any]]:
    audit = rig.service.audit
    audit._begin()
    while audit._writing is not None:
        await asyncio.wait({audit._writing})
    return [line for line in rig.read_audit() if line["event"] == event]


async def change_hosts(rig: Rig, session: str, *hosts: str) -> None:
    await rig.service.sessions.set_hosts(ALICE, session, HostsChange(hosts=hosts))
