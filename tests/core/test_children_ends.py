"""Sub-agents end with their parent, however that ends, and the next daemon knows them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import ChildSpec, Phase, RunSpec, SessionSpec, Status
from k8e.engine import EngineError, SandboxSpec
from k8e.policy import HostList
from tests.core.family import HOSTS, PARENT, change_hosts, check_hosts, make_child, read_audit
from tests.core.rig import ALICE, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


# The end


async def test_it_ends_with_its_parent_and_its_commands_are_told(family: Rig) -> None:
    children = [await make_child(family) for _ in range(2)]
    live = await family.service.runs.start(ALICE, RunSpec(children[0], "echo begun; sleep 1000"))
    assert [chunk.data async for chunk in _first(live.output())] == [b"begun\n"]
    await family.service.sessions.destroy(ALICE, PARENT)
    with pytest.raises(Fault) as caught:
        await live.result()
    assert (caught.value.code, "parent" in caught.value.detail) == ("session_ended", True)
    await family.assert_no_trace()
    for child in children:
        with pytest.raises(Fault, match="its parent ended"):
            await family.service.sessions.get(ALICE, child)
    ended = await read_audit(family, "session_ended")
    assert [line["session"] for line in ended][-1] == PARENT, "children first"
    assert [line["reason"] for line in ended] == ["parent_ended", "parent_ended", "destroyed"]
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await make_child(family)


async def _first(chunks: Any) -> Any:
    async for chunk in chunks:
        yield chunk
        return


async def test_a_child_ends_alone(family: Rig) -> None:
    child = await make_child(family)
    await family.run(child, "echo kept > file")
    await family.service.sessions.destroy(ALICE, child)
    assert (await family.service.sessions.get(ALICE, PARENT)).children == ()
    assert await family.service.files.read(ALICE, PARENT, "file") == b"kept\n"


async def test_one_that_is_being_made_ends_too(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, make = asyncio.Event(), family.engine.create

    async def make_slowly(sandbox: str, spec: SandboxSpec) -> None:
        await make(sandbox, spec)
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(family.engine, "create", make_slowly)
    making = asyncio.create_task(make_child(family))
    await begun.wait()
    with fault(Kind.CONFLICT, "session_destroying"):
        destroying = asyncio.create_task(family.service.sessions.destroy(ALICE, PARENT))
        await asyncio.sleep(0)
        await make_child(family, "too-late")
    await destroying
    with fault(Kind.CONFLICT, "session_destroyed"):
        await making
    await family.assert_no_trace()


async def test_who_leaves_while_it_is_made_leaves_nothing(family: Rig) -> None:
    making = asyncio.create_task(make_child(family, "left"))
    while "left" not in (await family.service.sessions.get(ALICE, PARENT)).children:
        await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait({making})
    while (await family.service.sessions.get(ALICE, PARENT)).children:
        await asyncio.sleep(0.01)
    assert await family.engine.list() == [family.sandbox_of(PARENT)]


async def test_it_ends_with_a_parent_whose_sandbox_dies(family: Rig) -> None:
    child = await make_child(family)
    run = await family.start_background(child, "sleep 1000")
    family.engine.kill_sandbox(family.sandbox_of(PARENT))
    while await family.service.sessions.list(ALICE):
        await family.service.look_after()
    await family.service._parts.tasks.close(10)
    await family.assert_no_trace()
    with fault(Kind.NOT_FOUND, "run_not_found"):
        await family.service.runs.poll(ALICE, run)


async def test_a_parent_waits_for_a_child_that_cannot_be_ended(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    child = await make_child(family)
    stubborn, destroy = family.sandbox_of(child), family.engine.destroy

    async def refuse(sandbox: str) -> None:
        if sandbox == stubborn:
            raise EngineError("mounts", "busy")
        await destroy(sandbox)

    monkeypatch.setattr(family.engine, "destroy", refuse)
    with fault(Kind.FAILED, "child_not_ended"):
        await family.service.sessions.destroy(ALICE, PARENT)
    assert set(await family.engine.list()) == {stubborn, family.sandbox_of(PARENT)}
    monkeypatch.undo()
    await family.service.look_after()
    await family.service._parts.tasks.close(10)
    await family.assert_no_trace()


async def test_it_ends_when_its_parent_is_stopped(rig: Rig) -> None:
    await rig.create(spec=SessionSpec(session_id=PARENT, persistent=True))
    child = await make_child(rig, ttl=100_000.0)
    await rig.run(child, "echo kept > file")
    run = asyncio.create_task(rig.run(child, "sleep 1000"))
    while not await rig.processes_inside(child):
        await asyncio.sleep(0.01)
    await rig.service.sessions.stop(ALICE, PARENT)
    with fault(Kind.LOST, "session_ended"):
        await run
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.sessions.get(ALICE, child)
    with fault(Kind.CONFLICT, "session_stopped"):
        await make_child(rig)
    await rig.service.sessions.start(ALICE, PARENT)
    assert (await rig.run(await make_child(rig), "cat file")).stdout == b"kept\n"


# Time


async def test_use_of_a_child_is_use_of_its_parent(family: Rig, clock: ManualClock) -> None:
    child = await make_child(family)
    clock.advance(3000)
    await family.run(child, "true")
    clock.advance(3000)
    assert await family.service.expire() == [], "the parent was not used for longer than its ttl, its child was"
    run = await family.start_background(child, "sleep 1000", limit=2000)
    clock.advance(5000)
    assert await family.service.expire() == [], "a command that runs in a child"
    await family.service.runs.kill(ALICE, run)
    clock.advance(3599)
    assert await family.service.expire() == []
    clock.advance(2)
    assert set(await family.service.expire()) == {PARENT, child}
    await family.assert_no_trace()


async def test_a_child_of_its_own_short_life_ends_before_its_parent(family: Rig, clock: ManualClock) -> None:
    child = await make_child(family, ttl=10.0)
    clock.advance(11)
    assert await family.service.expire() == [child]
    assert (await family.service.sessions.get(ALICE, PARENT)).phase is Phase.ACTIVE


# The next daemon


async def test_the_next_daemon_knows_the_family(folder: Path, clock: ManualClock) -> None:
    async with open_rig(folder, clock) as rig:
        await rig.create(spec=SessionSpec(session_id=PARENT, allowed_hosts=HOSTS))
        clock.wall_now -= 1_000_000  # a child that seems older than its parent
        child = await make_child(rig)
        run = await rig.start_background(child, "echo done")
    async with open_rig(folder, clock) as rig:
        assert (await rig.service.sessions.get(ALICE, PARENT)).children == (child,)
        assert (await rig.service.sessions.get(ALICE, child)).parent == PARENT
        assert (await rig.poll_to_the_end(run)).status is Status.COMPLETED
        with fault(Kind.DENIED, "child_of_child"):
            await rig.service.sessions.create_child(ALICE, child, ChildSpec())
        await change_hosts(rig, PARENT, "a.test")
        await check_hosts(rig, child, "a.test")
        await rig.service.sessions.destroy(ALICE, PARENT)
        await rig.assert_no_trace()


async def test_the_next_daemon_ends_the_children_of_a_parent_that_is_gone(folder: Path) -> None:
    async with open_rig(folder) as rig:
        for _ in range(2):
            await rig.create(spec=SessionSpec(session_id=PARENT))
            await make_child(rig, "child")
            old = rig.sandbox_of(PARENT)
            rig.engine.kill_sandbox(old)
            if (await rig.service.sessions.list(ALICE))[0].session_id == PARENT:
                break
    async with open_rig(folder) as rig:
        assert await rig.service.sessions.list(ALICE) == []
        await rig.assert_no_trace()
        # Another parent of the same name is not the one that it had.
        await rig.create(spec=SessionSpec(session_id=PARENT))
        assert (await rig.service.sessions.get(ALICE, PARENT)).children == ()


async def test_the_next_daemon_never_gives_a_child_more_than_its_parent(folder: Path) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=SessionSpec(session_id=PARENT, allowed_hosts=HOSTS))
        child = await make_child(rig)
        # What a daemon leaves that could write one record and not the other.
        await rig.store.set_hosts(rig.sandbox_of(PARENT), HostList.parse(["a.test"]))
    async with open_rig(folder) as rig:
        await check_hosts(rig, child, "a.test")


async def test_a_child_without_a_parent_on_record_is_removed(folder: Path) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=SessionSpec(session_id=PARENT))
        await make_child(rig, "child")
        await rig.store.forget_session(rig.sandbox_of(PARENT))
    async with open_rig(folder) as rig:
        assert await rig.service.sessions.list(ALICE) == []
        await rig.assert_no_trace()
        with pytest.raises(Fault, match="its parent ended"):
            await rig.service.sessions.get(ALICE, "child")
