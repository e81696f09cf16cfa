"""Sub-agents: a child shares its parent's workspace and nothing else, may never do more than it, and ends with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8e.core.children import choose_limits, choose_runtime, choose_shape, choose_workdir
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, ChildSpec, HostsChange, Phase, RunSpec, SessionSpec, Status
from k8e.engine import EngineError, Limits, Mount, Runtime, SandboxSpec, Shape
from k8e.policy import HostList
from k8e.settings import QuotasSettings, Settings
from tests.core.rig import ALICE, BOB, ROOT, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root

PARENT = "parent"
HOSTS = ("a.test", "*.b.test", "192.0.2.0/24")


@pytest.fixture
async def family(rig: Rig) -> Rig:
    """With a parent."""
    await rig.create(spec=SessionSpec(session_id=PARENT, allowed_hosts=HOSTS, env={"SECRET": "the parent's"}))
    return rig


async def make_child(rig: Rig, session_id: str = "", caller: Caller = ALICE, **wishes: Any) -> str:
    spec = ChildSpec(session_id=session_id, **wishes)
    return (await rig.service.subagent(caller, PARENT, spec)).session_id


async def check_hosts(rig: Rig, session: str, *hosts: str) -> None:
    """What is shown, on record and in force."""
    assert (await rig.service.get(ALICE, session)).hosts == HostList.parse(hosts)
    sandbox = rig.sandbox_of(session)
    record = await rig.store.find_session(sandbox)
    assert record is not None
    assert record.hosts.texts == rig.engine.egress(sandbox) == HostList.parse(hosts).texts


async def read_audit(rig: Rig, event: str) -> list[dict[str, Any]]:
    audit = rig.service.audit
    audit._begin()
    while audit._writing is not None:
        await asyncio.wait({audit._writing})
    return [line for line in rig.read_audit() if line["event"] == event]


# What it is


async def test_it_is_a_session_of_its_own_with_what_its_parent_has(family: Rig) -> None:
    child = await make_child(family, agent_type="reviewer")
    parent, shown = await family.service.get(ALICE, PARENT), await family.service.get(ALICE, child)
    assert (shown.parent, shown.labels, shown.children) == (PARENT, {"agent_type": "reviewer"}, ())
    assert (parent.parent, parent.children) == ("", (child,))
    same = ("tenant", "owner", "runtime", "image", "limits", "ttl", "hosts", "shape")
    assert [getattr(shown, name) for name in same] == [getattr(parent, name) for name in same]
    assert family.sandbox_of(child) != family.sandbox_of(PARENT)
    assert {session.session_id for session in await family.service.sessions(ALICE)} == {PARENT, child}
    *_, created = await read_audit(family, "session_created")
    assert (created["session"], created["parent"], created["agent_type"]) == (child, PARENT, "reviewer")


async def test_files_go_both_ways_and_nothing_else_does(family: Rig) -> None:
    child, other = await make_child(family), await make_child(family, env={"SECRET": "the other's"})
    await family.run(PARENT, "echo question > asked; echo x > /tmp/hidden; (sleep 1000; :) > /dev/null 2>&1 &")
    looked = await family.run(child, 'cat asked; ls /tmp; echo "[$SECRET]"; tr a-z A-Z < asked > answer')
    assert looked.stdout == b"question\n[]\n"
    assert (await family.run(other, "cat asked answer; echo $SECRET")).stdout == b"question\nQUESTION\nthe other's\n"
    assert await family.service.read_file(ALICE, PARENT, "answer") == b"QUESTION\n"
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done | grep -c '^sleep'"
    assert [(await family.run(name, script)).stdout for name in (PARENT, child, other)] == [b"1\n", b"0\n", b"0\n"]


async def test_eight_work_side_by_side(family: Rig) -> None:
    children = await asyncio.gather(*(make_child(family, f"c{number}") for number in range(8)))
    runs = await asyncio.gather(*(family.run(child, f"echo {child} > {child}; cat c*") for child in children))
    assert all(run.exit_code == 0 for run in runs)
    assert (await family.run(PARENT, "cat c*")).stdout.decode().split() == children


async def test_its_commands_start_where_it_was_told(family: Rig) -> None:
    child = await make_child(family, workspace_path="deep/down")
    assert (await family.service.get(ALICE, child)).workdir == "/workspace/deep/down"
    assert (await family.run(child, "pwd; echo here > file")).stdout == b"/workspace/deep/down\n"
    assert await family.service.read_file(ALICE, PARENT, "deep/down/file") == b"here\n"
    run = await family.start_background(child, "pwd")
    assert (await family.poll_to_the_end(run)).stdout == b"/workspace/deep/down\n"
    assert (await family.service.run(ALICE, RunSpec(child, "pwd", workdir="/tmp"))).stdout == b"/tmp\n"
    async with open_rig(family.folder) as later:
        assert (await later.run(child, "pwd")).stdout == b"/workspace/deep/down\n"


@pytest.mark.parametrize(
    ("path", "chosen"),
    [("", ""), ("a/b", "/workspace/a/b"), ("/workspace/", "/workspace"), ("//workspace//a/.", "/workspace/a")],
)
def test_a_directory_of_the_workspace_is_taken(path: str, chosen: str) -> None:
    assert choose_workdir(ChildSpec(workspace_path=path)) == chosen


@pytest.mark.parametrize(
    "path", ["/", "/tmp", "/workspaces", "..", "a/../..", "/workspace/../etc", "a\0b", "\udcff", "x" * 5000]
)
def test_no_other_is(path: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", "workspace_path"):
        choose_workdir(ChildSpec(workspace_path=path))


async def test_a_file_is_no_directory_to_work_in(family: Rig) -> None:
    await family.service.write_file(ALICE, PARENT, "taken", b"x", append=False)
    with pytest.raises(Fault) as caught:
        await make_child(family, "never", workspace_path="taken")
    assert caught.value.kind is not Kind.UNAVAILABLE
    assert (await family.service.get(ALICE, PARENT)).children == ()


# Never more than its parent


def test_a_runtime_is_not_weaker() -> None:
    assert choose_runtime(Runtime.GVISOR, None) is Runtime.GVISOR
    assert choose_runtime(Runtime.NATIVE, Runtime.GVISOR) is Runtime.GVISOR
    for parent, wanted in [
        (Runtime.GVISOR, Runtime.NATIVE),
        (Runtime.FIRECRACKER, Runtime.KATA),
        (Runtime.KATA, Runtime.GVISOR),
    ]:
        with fault(Kind.DENIED, "beyond_parent", "runtime"):
            choose_runtime(parent, wanted)


def test_limits_are_not_larger() -> None:
    parent = Limits(cpus=1.0, memory=1 << 30)
    assert choose_limits(parent, ChildSpec()) == parent
    assert choose_limits(parent, ChildSpec(limits={"cpus": 0.5, "pids": 64})) == replace(parent, cpus=0.5, pids=64)
    for name in ("cpus", "memory", "pids", "disk", "inodes", "open_files"):
        with fault(Kind.DENIED, "beyond_parent", f"limits.{name}"):
            choose_limits(parent, ChildSpec(limits={name: getattr(parent, name) + 1}))
    for wrong in ({"cpu": 1}, {"memory": 0}, {"memory": 2.5e7}, {"cpus": float("nan")}):
        with fault(Kind.INVALID, "invalid_argument"):
            choose_limits(parent, ChildSpec(limits=wrong))


def test_a_shape_is_not_wider() -> None:
    mount = Mount("/home/a", "/home/user/project", 1000, writable=True, kept=(".git",))
    bound = Shape((mount,), read_only=True, powerless=True)
    assert choose_shape(bound, ChildSpec()) == choose_shape(bound, ChildSpec(read_only=True)) == bound
    for wish in ("read_only", "powerless"):
        with fault(Kind.DENIED, "beyond_parent", wish):
            choose_shape(bound, replace(ChildSpec(), **{wish: False}))  # type: ignore[arg-type]
    free = Shape((mount,))
    assert choose_shape(free, ChildSpec(read_only=False)) == free
    assert choose_shape(free, ChildSpec(powerless=True)) == Shape((mount,), powerless=True)
    reader = choose_shape(free, ChildSpec(read_only=True))
    assert reader == Shape((replace(mount, writable=False),), read_only=True)


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"allowed_hosts": ["a.test", "evil.test"]}, "allowed_hosts"),
        ({"allowed_hosts": ["b.test"]}, "allowed_hosts"),
        ({"allowed_hosts": ["a.test:22"]}, "allowed_hosts"),
        ({"allowed_hosts": ["192.0.0.0/16"]}, "allowed_hosts"),
        ({"limits": {"memory": 1 << 40}}, "limits.memory"),
        ({"ttl": 3601.0}, "ttl"),
    ],
)
async def test_who_asks_for_more_is_refused_and_told_what_was_too_much(
    family: Rig, wishes: dict[str, Any], field: str
) -> None:
    with pytest.raises(Fault) as caught:
        await make_child(family, **wishes)
    got = caught.value
    assert (got.kind, got.code, got.field) == (Kind.DENIED, "beyond_parent", field)
    if field == "allowed_hosts":
        assert wishes["allowed_hosts"][-1] in got.error
        assert "a.test," not in got.error, "which entries are too much, and no others"
        assert got.hint
    assert len(await family.engine.list()) == 1
    (refused,) = await read_audit(family, "access_refused")
    assert (refused["call"], refused["subject"], refused["code"]) == ("subagent", PARENT, "beyond_parent")


async def test_it_may_have_less(family: Rig) -> None:
    wishes: dict[str, Any] = {"allowed_hosts": ["x.b.test", "192.0.2.7:443"], "limits": {"cpus": 0.1}, "ttl": 60.0}
    child = await make_child(family, **wishes)
    await check_hosts(family, child, "x.b.test", "192.0.2.7:443")
    shown = await family.service.get(ALICE, child)
    assert (shown.limits.cpus, shown.ttl) == (0.1, 60.0)


async def test_a_child_has_no_children(family: Rig) -> None:
    child = await make_child(family)
    with fault(Kind.DENIED, "child_of_child", "parent_session_id"):
        await family.service.subagent(ALICE, child, ChildSpec())


async def test_somebody_elses_parent_is_not_there(family: Rig) -> None:
    for caller in (BOB, Caller(ALICE.uid, "another"), Caller(0, "x", confined=True)):
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await make_child(family, caller=caller)
    for wrong in ("", "a b", "-x"):
        with fault(Kind.INVALID, "invalid_argument", "parent_session_id"):
            await family.service.subagent(ALICE, wrong, ChildSpec())
    child = await family.service.subagent(ROOT, PARENT, ChildSpec())
    assert (child.owner, child.tenant) == (ALICE.uid, "default"), "whoever asks, it is the parent's owner's"


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"session_id": "a b"}, "session_id"),
        ({"agent_type": "x\n"}, "agent_type"),
        ({"image": "-x"}, "image"),
        ({"env": {"1": ""}}, "env"),
        ({"ttl": -1.0}, "ttl"),
        ({"allowed_hosts": ["?"]}, "allowed_hosts"),
        ({"workspace_path": "/etc"}, "workspace_path"),
    ],
)
async def test_a_mistake_names_its_field(family: Rig, wishes: dict[str, Any], field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        await make_child(family, **wishes)


async def test_a_runtime_that_does_not_work_here_is_refused(family: Rig) -> None:
    with fault(Kind.UNAVAILABLE, "runtime_unavailable"):
        await make_child(family, runtime=Runtime.GVISOR)
    with fault(Kind.CONFLICT, "session_exists"):
        await make_child(family, PARENT)


async def test_there_is_an_end_to_their_number(folder: Path) -> None:
    async with open_rig(folder, settings=Settings(quotas=QuotasSettings(children=2, sessions=4))) as rig:
        await rig.create(spec=SessionSpec(session_id=PARENT))
        made = await asyncio.gather(*(make_child(rig) for _ in range(3)), return_exceptions=True)
        (refused,) = [each for each in made if isinstance(each, Fault)]
        assert (refused.kind, refused.code) == (Kind.EXHAUSTED, "too_many_children")
        await rig.create(spec=SessionSpec(session_id="another"))
        with fault(Kind.EXHAUSTED, "too_many_sessions"):
            await rig.service.subagent(ALICE, "another", ChildSpec())
        await rig.service.destroy(ALICE, next(each for each in made if isinstance(each, str)))
        await make_child(rig)


# When its parent's list changes


async def change(rig: Rig, session: str, *hosts: str) -> None:
    await rig.service.set_hosts(ALICE, session, HostsChange(hosts=hosts))


async def test_what_its_parent_loses_it_loses_too(family: Rig) -> None:
    child, other = await make_child(family), await make_child(family, allowed_hosts=["a.test"])
    await change(family, PARENT, "x.b.test", "192.0.2.128/25", "new.test")
    await check_hosts(family, child, "x.b.test", "192.0.2.128/25")
    await check_hosts(family, other)
    await change(family, PARENT, *HOSTS)
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
    await change(family, PARENT, "a.test")
    assert seen == [(child, ("a.test",)), (PARENT, ("a.test",))]


async def test_it_cannot_be_widened_beyond_its_parent(family: Rig) -> None:
    child = await make_child(family, allowed_hosts=[])
    await family.service.set_hosts(ALICE, child, HostsChange(add=["a.test"]))
    for wish, field in ((HostsChange(add=["evil.test"]), "add"), (HostsChange(hosts=["evil.test"]), "hosts")):
        with fault(Kind.DENIED, "beyond_parent", field):
            await family.service.set_hosts(ALICE, child, wish)
    await check_hosts(family, child, "a.test")


async def test_many_changes_of_both_at_once_keep_the_order(family: Rig) -> None:
    children = [await make_child(family) for _ in range(3)]
    lists = [HOSTS, ("a.test",), (), ("*.b.test", "new.test"), ("c.b.test",), HOSTS]
    work = [change(family, PARENT, *hosts) for hosts in lists * 2]
    work += [change(family, child, *hosts) for child in children for hosts in lists]
    await asyncio.gather(*work, return_exceptions=True)
    await change(family, PARENT, "c.b.test")
    for child in children:
        hosts = (await family.service.get(ALICE, child)).hosts.texts
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
    await change(family, PARENT, "a.test")  # does not wait for it
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
    await change(family, PARENT, "a.test")
    await check_hosts(family, PARENT, "a.test")
    await check_hosts(family, other, "a.test")
    with pytest.raises(Fault, match="narrowed"):
        await family.service.get(ALICE, child)
    assert stubborn not in await family.engine.list()


# The end


async def test_it_ends_with_its_parent_and_its_commands_are_told(family: Rig) -> None:
    children = [await make_child(family) for _ in range(2)]
    live = await family.service.start(ALICE, RunSpec(children[0], "echo begun; sleep 1000"))
    assert [chunk.data async for chunk in _first(live.output())] == [b"begun\n"]
    await family.service.destroy(ALICE, PARENT)
    with pytest.raises(Fault) as caught:
        await live.result()
    assert (caught.value.code, "parent" in caught.value.detail) == ("session_ended", True)
    await family.assert_no_trace()
    for child in children:
        with pytest.raises(Fault, match="its parent ended"):
            await family.service.get(ALICE, child)
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
    await family.service.destroy(ALICE, child)
    assert (await family.service.get(ALICE, PARENT)).children == ()
    assert await family.service.read_file(ALICE, PARENT, "file") == b"kept\n"


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
        destroying = asyncio.create_task(family.service.destroy(ALICE, PARENT))
        await asyncio.sleep(0)
        await make_child(family, "too-late")
    await destroying
    with fault(Kind.CONFLICT, "session_destroyed"):
        await making
    await family.assert_no_trace()


async def test_who_leaves_while_it_is_made_leaves_nothing(family: Rig) -> None:
    making = asyncio.create_task(make_child(family, "left"))
    while "left" not in (await family.service.get(ALICE, PARENT)).children:
        await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait({making})
    while (await family.service.get(ALICE, PARENT)).children:
        await asyncio.sleep(0.01)
    assert await family.engine.list() == [family.sandbox_of(PARENT)]


async def test_it_ends_with_a_parent_whose_sandbox_dies(family: Rig) -> None:
    child = await make_child(family)
    run = await family.start_background(child, "sleep 1000")
    family.engine.kill_sandbox(family.sandbox_of(PARENT))
    while await family.service.sessions(ALICE):
        await family.service.look_after()
    await family.service._tasks.close(10)
    await family.assert_no_trace()
    with fault(Kind.NOT_FOUND, "run_not_found"):
        await family.service.poll(ALICE, run)


async def test_a_parent_waits_for_a_child_that_cannot_be_ended(family: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    child = await make_child(family)
    stubborn, destroy = family.sandbox_of(child), family.engine.destroy

    async def refuse(sandbox: str) -> None:
        if sandbox == stubborn:
            raise EngineError("mounts", "busy")
        await destroy(sandbox)

    monkeypatch.setattr(family.engine, "destroy", refuse)
    with fault(Kind.FAILED, "child_not_ended"):
        await family.service.destroy(ALICE, PARENT)
    assert set(await family.engine.list()) == {stubborn, family.sandbox_of(PARENT)}
    monkeypatch.undo()
    await family.service.look_after()
    await family.service._tasks.close(10)
    await family.assert_no_trace()


async def test_it_ends_when_its_parent_is_stopped(rig: Rig) -> None:
    await rig.create(spec=SessionSpec(session_id=PARENT, persistent=True))
    child = await make_child(rig, ttl=100_000.0)
    await rig.run(child, "echo kept > file")
    run = asyncio.create_task(rig.run(child, "sleep 1000"))
    while not await rig.processes_inside(child):
        await asyncio.sleep(0.01)
    await rig.service.stop_session(ALICE, PARENT)
    with fault(Kind.LOST, "session_ended"):
        await run
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.get(ALICE, child)
    with fault(Kind.CONFLICT, "session_stopped"):
        await make_child(rig)
    await rig.service.start_session(ALICE, PARENT)
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
    await family.service.kill(ALICE, run)
    clock.advance(3599)
    assert await family.service.expire() == []
    clock.advance(2)
    assert set(await family.service.expire()) == {PARENT, child}
    await family.assert_no_trace()


async def test_a_child_of_its_own_short_life_ends_before_its_parent(family: Rig, clock: ManualClock) -> None:
    child = await make_child(family, ttl=10.0)
    clock.advance(11)
    assert await family.service.expire() == [child]
    assert (await family.service.get(ALICE, PARENT)).phase is Phase.ACTIVE


# The next daemon


async def test_the_next_daemon_knows_the_family(folder: Path, clock: ManualClock) -> None:
    async with open_rig(folder, clock) as rig:
        await rig.create(spec=SessionSpec(session_id=PARENT, allowed_hosts=HOSTS))
        clock.wall_now -= 1_000_000  # a child that seems older than its parent
        child = await make_child(rig)
        run = await rig.start_background(child, "echo done")
    async with open_rig(folder, clock) as rig:
        assert (await rig.service.get(ALICE, PARENT)).children == (child,)
        assert (await rig.service.get(ALICE, child)).parent == PARENT
        assert (await rig.poll_to_the_end(run)).status is Status.COMPLETED
        with fault(Kind.DENIED, "child_of_child"):
            await rig.service.subagent(ALICE, child, ChildSpec())
        await change(rig, PARENT, "a.test")
        await check_hosts(rig, child, "a.test")
        await rig.service.destroy(ALICE, PARENT)
        await rig.assert_no_trace()


async def test_the_next_daemon_ends_the_children_of_a_parent_that_is_gone(folder: Path) -> None:
    async with open_rig(folder) as rig:
        for _ in range(2):
            await rig.create(spec=SessionSpec(session_id=PARENT))
            await make_child(rig, "child")
            old = rig.sandbox_of(PARENT)
            rig.engine.kill_sandbox(old)
            if (await rig.service.sessions(ALICE))[0].session_id == PARENT:
                break
    async with open_rig(folder) as rig:
        assert await rig.service.sessions(ALICE) == []
        await rig.assert_no_trace()
        # Another parent of the same name is not the one that it had.
        await rig.create(spec=SessionSpec(session_id=PARENT))
        assert (await rig.service.get(ALICE, PARENT)).children == ()


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
        assert await rig.service.sessions(ALICE) == []
        await rig.assert_no_trace()
        with pytest.raises(Fault, match="its parent ended"):
            await rig.service.get(ALICE, "child")
