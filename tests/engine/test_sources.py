"""Which directories of the machine are shown to whom: opened with the rights of the user who asks, and never those that
lead to everything."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine import Mount, MountRefused
from k8e.engine.local.layout import Layout
from k8e.engine.local.mounts.detached import IdMapping
from k8e.engine.local.mounts.mounts import UNUSED_ID, id_mappings
from k8e.engine.local.mounts.source import Owner, act_as, find_owner, open_source
from k8e.engine.local.mounts.veil import resolve_hidden
from k8e.engine.local.runtime.bundle import ID_COUNT
from k8e.link.model import Identity
from tests.engine.grounds import OWNER, SECRET, Grounds, open_grounds

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the local engine needs root")
ROOT = Owner(0, 0, (), "/root")


@pytest.fixture(scope="module")
def grounds() -> Iterator[Grounds]:
    with open_grounds() as grounds:
        yield grounds


@pytest.fixture(scope="module")
def layout(grounds: Grounds) -> Layout:
    layout = Layout(grounds.top / "daemon/state", grounds.top / "daemon/run")
    (layout.state / "sandboxes/x").mkdir(parents=True)
    layout.run.mkdir()
    return layout


def refused(source: str | Path, owner: Owner, layout: Layout, *, writable: bool = False) -> MountRefused:
    mount = Mount(str(source), "/workspace", owner.uid, writable=writable)
    with pytest.raises(MountRefused) as raised, open_source(mount, owner, layout):
        pass
    return raised.value


def test_what_its_owner_can_enter_is_opened(grounds: Grounds, layout: Layout) -> None:
    for source in (grounds.project, grounds.home, grounds.project / ".git"):
        mount = Mount(str(source), "/workspace", OWNER, writable=True)
        with open_source(mount, find_owner(OWNER), layout) as handle:
            assert os.path.samestat(os.fstat(handle), source.stat())


@pytest.mark.parametrize(
    "source",
    ["/", "/proc", "/proc/sys", "/sys", "/sys/kernel", "/dev", "/dev/shm", "/proc/self/root/etc", "/proc/self/cwd"],
)
def test_what_nobody_should_show(layout: Layout, source: str) -> None:
    for owner in (ROOT, find_owner(OWNER)):
        error = refused(source, owner, layout)
        assert (error.control, bool(error.hint)) == (f"mount {source}", True)


@pytest.mark.parametrize("path", ["daemon", "daemon/state", "daemon/state/sandboxes/x", "daemon/run", "."])
def test_where_the_daemons_own_files_are(grounds: Grounds, layout: Layout, path: str) -> None:
    assert "daemon" in refused(grounds.top / path, ROOT, layout).cause
    link = grounds.top / "link"
    link.symlink_to(path)
    try:
        assert "daemon" in refused(link, ROOT, layout).cause
    finally:
        link.unlink()


def test_what_its_owner_cannot_enter(grounds: Grounds, layout: Layout) -> None:
    owner = find_owner(OWNER)
    for source in (grounds.roots, grounds.roots / "secret", grounds.top / "missing", grounds.project / "to-roots"):
        assert str(OWNER) in refused(source, owner, layout).cause, source
    assert "not a directory" in refused(grounds.project / "private", owner, layout).cause
    refused(grounds.home, find_owner(OWNER + 1), layout)  # it is found, and not entered
    refused("/root", owner, layout)


def test_a_whole_home_is_not_writable(grounds: Grounds, layout: Layout) -> None:
    owner = Owner(OWNER, OWNER, (), str(grounds.home / "deep"))
    (grounds.home / "deep").mkdir(exist_ok=True)
    for source in (grounds.home / "deep", grounds.home):
        assert "home" in refused(source, owner, layout, writable=True).cause
        with open_source(Mount(str(source), "/home/user", OWNER), owner, layout):
            pass
    with open_source(Mount(str(grounds.project), "/workspace", OWNER, writable=True), owner, layout):
        pass


def test_whoever_swaps_a_link_gets_no_more_than_is_theirs(grounds: Grounds, layout: Layout) -> None:
    """The name leads to a project at one moment and to what only root may enter at the next."""
    name, fine, not_fine = (grounds.top / each for each in ("swapped", "fine", "not-fine"))
    fine.symlink_to(grounds.project)
    not_fine.symlink_to(grounds.roots)
    os.symlink(grounds.project, name)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for target in (not_fine, fine):
                os.link(target, f"{name}.new", follow_symlinks=False)
                os.rename(f"{name}.new", name)
                if os.path.lexists(f"{name}.new"):
                    os.unlink(f"{name}.new")

    swapper = threading.Thread(target=swap)
    swapper.start()
    outcomes = {"refused": 0, "opened": 0}
    try:
        while min(outcomes.values()) < 20:
            try:
                with open_source(Mount(str(name), "/workspace", OWNER), find_owner(OWNER), layout) as handle:
                    assert os.path.samestat(os.fstat(handle), grounds.project.stat())
                outcomes["opened"] += 1
            except MountRefused:
                outcomes["refused"] += 1
    finally:
        done.set()
        swapper.join()


# Acting as a user


def test_only_the_thread_becomes_the_owner(grounds: Grounds) -> None:
    def look() -> dict[str, str]:
        status = Path("/proc/thread-self/status").read_text()
        return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)

    before = look()
    inside = act_as(Owner(OWNER, OWNER, (4321, 4322), ""), look)
    assert inside["Uid"].split() == ["0", "0", "0", str(OWNER)], "no user can send signals to it"
    assert inside["Groups"].split() == ["4321", "4322"]
    assert int(inside["CapEff"], 16) == int(inside["CapPrm"], 16) == 0
    after = look()
    assert {key: before[key] for key in ("Uid", "Gid", "Groups", "CapEff")} == {
        key: after[key] for key in ("Uid", "Gid", "Groups", "CapEff")
    }
    assert (grounds.roots / "secret").read_text() == SECRET


def test_what_the_owner_may_not_do_is_not_done(grounds: Grounds) -> None:
    owner = find_owner(OWNER)
    with pytest.raises(PermissionError):
        act_as(owner, lambda: (grounds.roots / "secret").read_text())
    with pytest.raises(PermissionError):
        act_as(owner, lambda: os.chown(grounds.project, 0, 0))
    with pytest.raises(PermissionError):
        act_as(owner, lambda: os.listdir("/proc/1/root/"))
    act_as(owner, lambda: (grounds.project / "made").mkdir())
    assert (grounds.project / "made").stat().st_uid == OWNER
    assert act_as(ROOT, lambda: (grounds.roots / "secret").read_text()) == SECRET


def test_a_group_opens_what_it_may(grounds: Grounds) -> None:
    shared = grounds.top / "shared"
    shared.mkdir()
    os.chown(shared, 0, 4321)
    shared.chmod(0o750)
    assert act_as(Owner(OWNER, OWNER, (4321,), ""), lambda: os.listdir(shared)) == []
    with pytest.raises(PermissionError):
        act_as(Owner(OWNER, OWNER, (), ""), lambda: os.listdir(shared))


# Whose files are whose


@pytest.mark.parametrize("first", [None, 0x30000000])
@pytest.mark.parametrize("user", [Identity(1000, 1000), Identity(0, 0), Identity(1000, 0)])
def test_only_the_owner_is_mapped_and_nobody_to_root(first: int | None, user: Identity) -> None:
    for owner in (Owner(OWNER, 20, (0, 4321), ""), ROOT):
        users, groups = id_mappings(owner, first, user)
        assert users[0] == IdMapping(owner.uid, (first or 0) + (user.uid or 0), 1)
        assert groups[0] == IdMapping(owner.gid, (first or 0) + (user.gid or 0), 1)
        assert {span.stored for span in users} <= {owner.uid, UNUSED_ID}
        assert {span.stored for span in groups} <= {owner.gid, *owner.groups, UNUSED_ID}
        for spans in (users, groups):
            assert all(span.count == 1 for span in spans)
            assert len({span.stored for span in spans}) == len({span.shown for span in spans}) == len(spans)
            if first is None:  # gVisor makes files as root of the machine, who has to have an id there
                assert 0 in {span.shown for span in spans}
            else:
                assert all(first <= span.shown < first + ID_COUNT for span in spans)


# What hidden names lead to


def test_where_links_lead_is_hidden_too(grounds: Grounds) -> None:
    home = grounds.top / "links"
    (home / "real/deep").mkdir(parents=True)
    for name, target in {"direct": "real", "chain": "direct", "far": "/etc", "loop": "loop", "gone": "missing"}.items():
        (home / name).symlink_to(target)
    (home / "middle").symlink_to(home / "real")
    handle = os.open(home, os.O_PATH)
    try:

        def hidden(*names: str) -> set[str]:
            mount = Mount(str(home), "/home/user", 0, hidden=names)
            return {"/".join(steps) for steps in resolve_hidden(mount, handle, ROOT)}

        assert hidden("plain", "not/there") == {"plain", "not/there"}
        assert hidden("direct") == {"direct", "real"}
        assert hidden("chain") == {"chain", "real"}
        assert hidden("middle/deep") == {"real/deep"}
        assert hidden("far") == {"far"}
        assert hidden("far/passwd") == set(), "not below it at all"
        assert hidden("loop") == {"loop"}
        assert hidden("gone") == {"gone", "missing"}
        (home / "all").symlink_to(".")
        with pytest.raises(MountRefused):
            hidden("all")
        (home / "above").symlink_to("..")
        with pytest.raises(MountRefused):
            hidden("above")
    finally:
        os.close(handle)
