"""Sub-agents: a child shares its parent's workspace and nothing else, and may never do more than it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, ChildSpec, RunSpec, SessionSpec
from k8e.core.sessions.children import check_runtime, choose_limits, choose_shape, choose_workdir
from k8e.engine import Limits, Mount, Runtime, Shape
from k8e.settings import QuotasSettings, Settings
from tests.core.family import PARENT, check_hosts, make_child, read_audit
from tests.core.rig import ALICE, BOB, ROOT, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


# What it is


async def test_it_is_a_session_of_its_own_with_what_its_parent_has(family: Rig) -> None:
    child = await make_child(family, agent_type="reviewer")
    parent, shown = await family.service.sessions.get(ALICE, PARENT), await family.service.sessions.get(ALICE, child)
    assert (shown.parent, shown.labels, shown.children) == (PARENT, {"agent_type": "reviewer"}, ())
    assert (parent.parent, parent.children) == ("", (child,))
    same = ("tenant", "owner", "runtime", "image", "limits", "ttl", "hosts", "shape")
    assert [getattr(shown, name) for name in same] == [getattr(parent, name) for name in same]
    assert family.sandbox_of(child) != family.sandbox_of(PARENT)
    assert {session.session_id for session in await family.service.sessions.list(ALICE)} == {PARENT, child}
    *_, created = await read_audit(family, "session_created")
    assert (created["session"], created["parent"], created["agent_type"]) == (child, PARENT, "reviewer")


async def test_files_go_both_ways_and_nothing_else_does(family: Rig) -> None:
    child, other = await make_child(family), await make_child(family, env={"SECRET": "the other's"})
    await family.run(PARENT, "echo question > asked; echo x > /tmp/hidden; (sleep 1000; :) > /dev/null 2>&1 &")
    looked = await family.run(child, 'cat asked; ls /tmp; echo "[$SECRET]"; tr a-z A-Z < asked > answer')
    assert looked.stdout == b"question\n[]\n"
    assert (await family.run(other, "cat asked answer; echo $SECRET")).stdout == b"question\nQUESTION\nthe other's\n"
    assert await family.service.files.read(ALICE, PARENT, "answer") == b"QUESTION\n"
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done | grep -c '^sleep'"
    assert [(await family.run(name, script)).stdout for name in (PARENT, child, other)] == [b"1\n", b"0\n", b"0\n"]


async def test_eight_work_side_by_side(family: Rig) -> None:
    children = await asyncio.gather(*(make_child(family, f"c{number}") for number in range(8)))
    runs = await asyncio.gather(*(family.run(child, f"echo {child} > {child}; cat c*") for child in children))
    assert all(run.exit_code == 0 for run in runs)
    assert (await family.run(PARENT, "cat c*")).stdout.decode().split() == children


async def test_its_commands_start_where_it_was_told(family: Rig) -> None:
    child = await make_child(family, workspace_path="deep/down")
    assert (await family.service.sessions.get(ALICE, child)).workdir == "/workspace/deep/down"
    assert (await family.run(child, "pwd; echo here > file")).stdout == b"/workspace/deep/down\n"
    assert await family.service.files.read(ALICE, PARENT, "deep/down/file") == b"here\n"
    run = await family.start_background(child, "pwd")
    assert (await family.poll_to_the_end(run)).stdout == b"/workspace/deep/down\n"
    assert (await family.service.runs.run(ALICE, RunSpec(child, "pwd", workdir="/tmp"))).stdout == b"/tmp\n"
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
    await family.service.files.write(ALICE, PARENT, "taken", b"x", append=False)
    with pytest.raises(Fault) as caught:
        await make_child(family, "never", workspace_path="taken")
    assert caught.value.kind is not Kind.UNAVAILABLE
    assert (await family.service.sessions.get(ALICE, PARENT)).children == ()


# Never more than its parent


def test_a_runtime_is_not_weaker() -> None:
    assert check_runtime(Runtime.GVISOR, None) is Runtime.GVISOR
    assert check_runtime(Runtime.NATIVE, Runtime.GVISOR) is Runtime.GVISOR
    for parent, wanted in [
        (Runtime.GVISOR, Runtime.NATIVE),
        (Runtime.FIRECRACKER, Runtime.KATA),
        (Runtime.KATA, Runtime.GVISOR),
    ]:
        with fault(Kind.DENIED, "beyond_parent", "runtime"):
            check_runtime(parent, wanted)


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
    shown = await family.service.sessions.get(ALICE, child)
    assert (shown.limits.cpus, shown.ttl) == (0.1, 60.0)


async def test_a_child_has_no_children(family: Rig) -> None:
    child = await make_child(family)
    with fault(Kind.DENIED, "child_of_child", "parent_session_id"):
        await family.service.sessions.create_child(ALICE, child, ChildSpec())


async def test_another_users_parent_is_not_there(family: Rig) -> None:
    for caller in (BOB, Caller(ALICE.uid, "another"), Caller(0, "x", confined=True)):
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await make_child(family, caller=caller)
    for wrong in ("", "a b", "-x"):
        with fault(Kind.INVALID, "invalid_argument", "parent_session_id"):
            await family.service.sessions.create_child(ALICE, wrong, ChildSpec())
    child = await family.service.sessions.create_child(ROOT, PARENT, ChildSpec())
    assert (child.owner, child.tenant) == (ALICE.uid, "default"), "it is the parent's owner's, also when root asks"


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
            await rig.service.sessions.create_child(ALICE, "another", ChildSpec())
        await rig.service.sessions.destroy(ALICE, next(each for each in made if isinstance(each, str)))
        await make_child(rig)
