"""Mounts that show files as another range of owners, and are nowhere until they are attached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine.local.disk.cleanup import unmount
from k8e.engine.local.mounts.detached import IdMapping, cloned, map_ids
from k8e.engine.local.system.calls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    move_mount,
    open_tree,
)
from tests.engine.traces import mount_points

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

FIRST = 0x30000000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for uid in (0, 1000, 65535, 65536):
        (source / str(uid)).write_text("content")
        os.chown(source / str(uid), uid, uid)
    return source


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "point"
    point.mkdir()
    yield point
    assert unmount(point)


def test_owners_are_shown_in_another_range(source: Path, point: Path) -> None:
    with cloned(source, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) as tree:
        map_ids(tree, [IdMapping(0, FIRST, 65536)])
        move_mount(tree, point)
    overflow = int(Path("/proc/sys/fs/overflowuid").read_text())
    shown = {name: (point / name).stat().st_uid for name in os.listdir(point)}
    assert shown == {"0": FIRST, "1000": FIRST + 1000, "65535": FIRST + 65535, "65536": overflow}
    assert {(source / name).stat().st_uid for name in shown} == {0, 1000, 65535, 65536}
    with pytest.raises(OSError, match="Read-only"):
        (point / "0").write_text("changed")


def test_users_and_groups_can_be_mapped_differently(source: Path, point: Path) -> None:
    with cloned(source) as tree:
        map_ids(tree, [IdMapping(1000, FIRST, 1)], [IdMapping(1000, FIRST + 7, 1)])
        move_mount(tree, point)
    status = (point / "1000").stat()
    assert (status.st_uid, status.st_gid) == (FIRST, FIRST + 7)


def test_a_mount_that_was_not_attached_is_nowhere(source: Path) -> None:
    with cloned(source, MOUNT_ATTR_RDONLY) as tree:
        assert os.stat("1000", dir_fd=tree).st_uid == 1000
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir("more", dir_fd=tree)
        os.mkdir(source / "more")
        assert not [point for point in mount_points() if point.startswith(os.fspath(source.parent))]


def test_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with cloned(tmp_path / "link") as tree:
        assert os.readlink(f"/proc/self/fd/{tree}") != os.fspath(source)
        with pytest.raises(NotADirectoryError):
            os.listdir(tree)


def children() -> set[str]:
    line = f"PPid:\t{os.getpid()}\n".encode()
    return {path.parent.name for path in Path("/proc").glob("[0-9]*/stat") if line in status(path)}


def status(path: Path) -> bytes:
    try:
        return path.with_name("status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_mapping_leaves_no_process_behind(source: Path) -> None:
    before = children()
    with cloned(source) as tree:
        map_ids(tree, [IdMapping(0, FIRST, 65536)])
        assert children() == before


def test_a_mappings_process_ends_by_itself(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may be killed first. The process would live on with the sockets and the lock of the next daemon."""
    ends = []
    wait = os.waitpid

    def wait_and_tell(pid: int, options: int) -> tuple[int, int]:
        _, status = wait(pid, options)
        ends.append(os.waitstatus_to_exitcode(status))
        return pid, status

    with monkeypatch.context() as patch:
        patch.setattr(os, "waitpid", wait_and_tell)
        with cloned(source) as tree:
            map_ids(tree, [IdMapping(0, FIRST, 65536)])
        assert ends == [0], "killed, and not ended by itself"


def test_a_mapping_that_the_kernel_refuses_is_an_error(source: Path) -> None:
    with cloned(source) as tree, pytest.raises(OSError, match="Invalid argument"):
        map_ids(tree, [IdMapping(0, FIRST, 10), IdMapping(5, FIRST, 10)])
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        open_tree(Path("/nonexistent"))
