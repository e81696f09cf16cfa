"""What sub-agents may reach when their parent's list changes: never more than it, not for a moment."""

from __future__ import annotations

import asyncio

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import HostsChange
from k8e.engine import EngineError, SandboxSpec
from k8e.policy import HostList
from tests.core.family import HOSTS, PARENT, change_hosts, check_hosts, make_child, read_audit
from tests.core.rig import ALICE, Rig, fault
from tests.sandboxes import needs_root

pytestmark = needs_root


async def test_what_its_parent_loses_it_loses_too(family: Rig) -> None:
    child, other = await make_child(family), await make_child(family, allowed_hosts=["a.test"])
    await change_hosts(family, PARENT, "x.b.test", "192.0.2.128/25", "new.test")
    await check_hosts(family, child, "x.b.test", "192.0.2.128/25")
    await check_hosts(family, other)
    await change_hosts(family, PARENT, *HOSTS)
    await check_hosts(family, child, "x.b.test", "192.0.2.128/25")
    narrowed = await read_audit(family, "hosts_narrowed")
    assert {line["session"] for line in narrowed} == {child, other}


async def test_it_is_never_ahead_of_its_parent(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    child = await make_child(family)
    sandboxes, seen = {family.sandbox_of(name): name for name in (PARENT, child)}, []
    put_in_force = family.engine.set_egress

    async def watch(sandbox: str, hosts: HostList) -> None:
        await put_in_force(sandbox, hosts)
        seen.append((sandboxes[sandbox], hosts.texts))

    monkeypatch.setattr(family.engine, "set_egress", watch)
    await change_hosts(family, PARENT, "a.test")
    assert seen == [(child, ("a.test",)), (PARENT, ("a.test",))]


async def test_it_cannot_be_widened_beyond_its_parent(family: Rig) -> None:
    child = await make_child(family, allowed_hosts=[])
    await family.service.sessions.set_hosts(ALICE, child, HostsChange(add=["a.test"]))
    for wish, field in ((HostsChange(add=["evil.test"]), "add"), (HostsChange(hosts=["evil.test"]), "hosts")):
        with fault(Kind.DENIED, "beyond_parent", field):
            await family.service.sessions.set_hosts(ALICE, child, wish)
    await check_hosts(family, child, "a.test")


async def test_many_changes_of_both_at_once_keep_the_order(family: Rig) -> None:
    children = [await make_child(family) for _ in range(3)]
    lists = [HOSTS, ("a.test",), (), ("*.b.test", "new.test"), ("c.b.test",), HOSTS]
    work = [change_hosts(family, PARENT, *hosts) for hosts in lists * 2]
    work += [change_hosts(family, child, *hosts) for child in children for hosts in lists]
    await asyncio.gather(*work, return_exceptions=True)
    await change_hosts(family, PARENT, "c.b.test")
    for child in children:
        hosts = (await family.service.sessions.get(ALICE, child)).hosts.texts
        assert set(hosts) <= {"c.b.test"}
        await check_hosts(family, child, *hosts)


async def test_it_learns_of_a_change_while_it_is_made(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    make = family.engine.create

    async def make_slowly(sandbox: str, spec: SandboxSpec) -> None:
        begun.set()
        await make(sandbox, spec)
        await go.wait()

    monkeypatch.setattr(family.engine, "create", make_slowly)
    making = asyncio.create_task(make_child(family, "late"))
    await begun.wait()
    await change_hosts(family, PARENT, "a.test")  # does not wait for it
    go.set()
    assert await making == "late"
    await check_hosts(family, "late", "a.test")


async def test_one_that_cannot_be_narrowed_is_ended(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    child, other = await make_child(family), await make_child(family)
    stubborn, put_in_force = family.sandbox_of(child), family.engine.set_egress

    async def refuse(sandbox: str, hosts: HostList) -> None:
        if sandbox == stubborn:
            raise EngineError("network", "no")
        await put_in_force(sandbox, hosts)

    monkeypatch.setattr(family.engine, "set_egress", refuse)
    await change_hosts(family, PARENT, "a.test")
    await check_hosts(family, PARENT, "a.test")
    await check_hosts(family, other, "a.test")
    with pytest.raises(Fault, match="narrowed"):
        await family.service.sessions.get(ALICE, child)
    assert stubborn not in await family.engine.list()
