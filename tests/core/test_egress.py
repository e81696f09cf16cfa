"""What sessions may reach: chosen, changed, and the same on record and in force whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import HostsChange, SessionSpec
from k8e.core.sessions.hosts import apply_change
from k8e.core.store.schema import StoreFailed
from k8e.engine import EngineError
from k8e.policy import NOTHING, HostList
from k8e.settings import EgressSettings, Settings
from tests.core.bare_engine import DEFAULT_HOSTS
from tests.core.rig import ALICE, BOB, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root

USUAL = HostList.parse(DEFAULT_HOSTS)


async def set_hosts(rig: Rig, session: str, *hosts: str) -> None:
    await rig.service.sessions.set_hosts(ALICE, session, HostsChange(hosts=hosts))


async def check_hosts(rig: Rig, session: str, hosts: HostList) -> None:
    """What is shown, on record and in force."""
    assert (await rig.service.sessions.get(ALICE, session)).hosts == hosts
    sandbox = rig.sandbox_of(session)
    record = await rig.store.find_session(sandbox)
    assert record is not None
    assert record.session.hosts == hosts
    assert rig.engine.egress(sandbox) == hosts.texts


# Choosing


@pytest.mark.parametrize(
    ("wanted", "hosts"),
    [(None, USUAL), ([], NOTHING), (["B.test.", "a.test:22", "b.test"], HostList.parse(["a.test:22", "b.test"]))],
)
async def test_a_session_begins_with_its_list(rig: Rig, wanted: Sequence[str] | None, hosts: HostList) -> None:
    session = await rig.create(spec=SessionSpec(allowed_hosts=wanted))
    await check_hosts(rig, session, hosts)


@pytest.mark.parametrize("usual", [HostList.parse(["mirror.test"]), NOTHING])
async def test_the_settings_replace_the_usual_list(folder: Path, usual: HostList) -> None:
    async with open_rig(folder, settings=Settings(egress=EgressSettings(allowed_hosts=usual))) as rig:
        await check_hosts(rig, await rig.create(), usual)
        session = await rig.create(spec=SessionSpec(allowed_hosts=["a.test"]))
        await check_hosts(rig, session, HostList.parse(["a.test"]))


@pytest.mark.parametrize("entry", ["http://a.test", "a b", "", "127.0.0.1", "169.254.169.254", "a.test:0", "\0"])
async def test_what_is_no_host_is_refused_before_anything_is_made(rig: Rig, entry: str) -> None:
    with pytest.raises(Fault) as caught:
        await rig.create(spec=SessionSpec(allowed_hosts=["good.test", entry]))
    got = caught.value
    assert (got.kind, got.code, got.field) == (Kind.INVALID, "invalid_argument", "allowed_hosts")
    assert got.hint
    await rig.assert_no_trace()


# Changing


def test_changes_are_arithmetic() -> None:
    old = HostList.parse(["a.test", "b.test"])
    assert apply_change(old, HostsChange()) == old
    assert apply_change(old, HostsChange(add=["c.test"], remove=["A.test"])) == HostList.parse(["b.test", "c.test"])
    assert apply_change(old, HostsChange(hosts=["c.test"])) == HostList.parse(["c.test"])
    assert apply_change(old, HostsChange(hosts=[])) == NOTHING


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (HostsChange(hosts=[], add=["c.test"]), "hosts"),
        (HostsChange(hosts=["c.test"], remove=["a.test"]), "hosts"),
        (HostsChange(add=["c.test"], remove=["c.test"]), "remove"),
        (HostsChange(remove=["c.test"]), "remove"),
        (HostsChange(remove=["x.wild.test"]), "remove"),
        (HostsChange(add=["?"]), "add"),
        (HostsChange(add=[f"h{number}.test" for number in range(512)]), "add"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: HostsChange, field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        apply_change(HostList.parse(["a.test", "*.wild.test"]), change)


async def test_a_change_is_in_force_and_on_record_when_it_is_answered(rig: Rig) -> None:
    session = await rig.create()
    shown = await rig.service.sessions.set_hosts(ALICE, session, HostsChange(add=["c.test"]))
    await check_hosts(rig, session, USUAL.plus(HostList.parse(["c.test"])))
    assert shown.hosts == (await rig.service.sessions.get(ALICE, session)).hosts
    await set_hosts(rig, session)
    await check_hosts(rig, session, NOTHING)


async def test_many_at_once_are_one_after_the_other(rig: Rig) -> None:
    session = await rig.create(spec=SessionSpec(allowed_hosts=[]))
    names = [f"h{number}.test" for number in range(30)]
    await asyncio.gather(*(rig.service.sessions.set_hosts(ALICE, session, HostsChange(add=[name])) for name in names))
    await check_hosts(rig, session, HostList.parse(names))


async def test_who_leaves_leaves_nothing_half_done(rig: Rig) -> None:
    session = await rig.create()
    asking = asyncio.create_task(rig.service.sessions.set_hosts(ALICE, session, HostsChange(hosts=["c.test"])))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    await rig.service._parts.tasks.close(10)
    (live,) = rig.service._registry
    await check_hosts(rig, session, live.session.hosts)


async def test_only_its_owner_can_and_only_while_it_lives(rig: Rig) -> None:
    session = await rig.create()
    change = HostsChange(hosts=["evil.test"])
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.set_hosts(BOB, session, change)
    await check_hosts(rig, session, USUAL)
    ending = asyncio.create_task(rig.service.sessions.destroy(ALICE, session))
    await asyncio.sleep(0)
    with fault(Kind.CONFLICT, "session_destroying"):
        await rig.service.sessions.set_hosts(ALICE, session, change)
    await ending
    with pytest.raises(Fault) as caught:
        await rig.service.sessions.set_hosts(ALICE, session, change)
    assert (caught.value.code, caught.value.detail) == ("session_not_found", "it was destroyed")


async def test_a_sandbox_that_died_is_said_to_be_gone(rig: Rig) -> None:
    session = await rig.create()
    sandbox = rig.sandbox_of(session)
    await rig.engine.destroy(sandbox)
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await set_hosts(rig, session, "c.test")


# Failing


async def test_when_the_kernel_refuses_the_old_list_stays(rig: Rig) -> None:
    session = await rig.create()
    rig.engine.egress_failure = EngineError("network", "the table is gone", "Restart it.")
    with pytest.raises(Fault) as caught:
        await set_hosts(rig, session, "c.test")
    assert (caught.value.kind, caught.value.code, caught.value.hint) == (Kind.FAILED, "sandbox_failed", "Restart it.")
    await check_hosts(rig, session, USUAL)


async def test_what_cannot_be_recorded_is_not_opened(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await rig.create()
    monkeypatch.setattr(rig.store, "set_hosts", fail_to_write)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await rig.service.sessions.set_hosts(ALICE, session, HostsChange(add=["c.test"]))
    await check_hosts(rig, session, USUAL)


async def test_but_what_is_to_be_closed_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await rig.create()
    with monkeypatch.context() as context:
        context.setattr(rig.store, "set_hosts", fail_to_write)
        with fault(Kind.UNAVAILABLE, "hosts_not_recorded"):
            await set_hosts(rig, session)
        assert rig.engine.egress(rig.sandbox_of(session)) == ()
        assert (await rig.service.sessions.get(ALICE, session)).hosts == NOTHING
    await rig.service.look_after()
    await check_hosts(rig, session, NOTHING)


async def fail_to_write(sandbox: str, hosts: HostList) -> None:
    raise StoreFailed("no space left on device")


# The next daemon


@pytest.mark.parametrize("forgotten", ["record", "kernel"])
async def test_the_next_daemon_puts_the_record_in_force(folder: Path, forgotten: str) -> None:
    """Wherever between the two the last one died."""
    async with open_rig(folder) as rig:
        session = await rig.create()
        sandbox = rig.sandbox_of(session)
        if forgotten == "kernel":
            await rig.store.set_hosts(sandbox, HostList.parse(["c.test"]))
        else:
            await rig.engine.set_egress(sandbox, HostList.parse(["c.test"]))
    async with open_rig(folder) as rig:
        await check_hosts(rig, session, HostList.parse(["c.test"]) if forgotten == "kernel" else USUAL)


async def test_a_session_whose_list_cannot_be_put_in_force_is_ended(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
    async with open_rig(folder, failing=EngineError("network", "no table")) as rig:
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.service.sessions.get(ALICE, session)
        await rig.assert_no_trace()


async def test_an_entry_that_no_list_may_have_any_more_is_off_it(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create()
        await rig.store._execute("UPDATE sessions SET hosts = ?", '["127.0.0.1", "a.test"]')
    async with open_rig(folder) as rig:
        assert rig.engine.egress(rig.sandbox_of(session)) == ("a.test",)
