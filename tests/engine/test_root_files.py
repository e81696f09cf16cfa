"""Writing and reading below a root whose content is hostile: whatever its links say, nothing outside is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine.local.roots.root_files import RootFiles

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files get owners")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Beside it lies what must not change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "resolv.conf").write_text("the machine's")
    (outside / "passwd").write_text("the machine's")
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def inside(root: Path) -> Iterator[RootFiles]:
    with RootFiles(root) as inside:
        yield inside
    left = {path.name: path.read_text() for path in (root.parent / "outside").iterdir()}
    assert left == {"resolv.conf": "the machine's", "passwd": "the machine's"}


LINKS = ["../outside", "../../../../..{}", "{}", "/../..{}", "loop/loop", "etc"]


@pytest.mark.parametrize("link", LINKS)
def test_a_folder_that_is_a_link_leads_nowhere_outside(inside: RootFiles, root: Path, link: str) -> None:
    target = link.format(root.parent / "outside")
    (root / "etc").symlink_to(target)
    (root / "loop").symlink_to("loop")
    inside.write("/etc/resolv.conf", b"ours")
    assert inside.read("/etc/resolv.conf", 100) == b"ours"


@pytest.mark.parametrize("link", ["../../outside/resolv.conf", "{}/resolv.conf", "/proc/self/root{}/resolv.conf"])
def test_a_file_that_is_a_link_is_replaced(inside: RootFiles, root: Path, link: str) -> None:
    (root / "etc").mkdir()
    (root / "etc/resolv.conf").symlink_to(link.format(root.parent / "outside"))
    assert inside.read("/etc/resolv.conf", 100) is None
    inside.write("/etc/resolv.conf", b"ours")
    assert (root / "etc/resolv.conf").read_bytes() == b"ours"
    assert not (root / "etc/resolv.conf").is_symlink()


def test_links_inside_are_followed_as_they_are_inside(inside: RootFiles, root: Path) -> None:
    (root / "usr/etc").mkdir(parents=True)
    (root / "etc").symlink_to("/usr/etc")
    (root / "usr/etc/passwd").symlink_to("/usr/etc/users")
    (root / "usr/etc/users").write_text("root:x:0:0::/:")
    inside.write("/etc/hosts", b"ours")
    assert (root / "usr/etc/hosts").read_bytes() == b"ours"
    assert inside.read("/etc/passwd", 100) == b"root:x:0:0::/:"


def test_what_is_no_folder_gives_way(inside: RootFiles, root: Path) -> None:
    (root / "etc").write_text("a file")
    (root / "home").symlink_to("nowhere")
    os.mkfifo(root / "opt")
    for path in ("/etc/ssl/certs", "/home/user", "/opt/k8e"):
        inside.make_folder(path, owner=(5, 6), mode=0o750)
        status = (root / path[1:]).lstat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (5, 6, 0o750)
    assert (root / "home").lstat().st_uid == 0


def test_points_for_mounts_are_never_links(inside: RootFiles, root: Path) -> None:
    (root / "real").mkdir()
    (root / "tmp").symlink_to("real")
    (root / "agent").symlink_to("tmp")
    (root / "proc").write_text("a file")
    for name in ("tmp", "proc", "dev"):
        inside.make_point(name, mode=0o1777)
        assert (root / name).is_dir()
        assert not (root / name).is_symlink()
    assert (root / "dev").stat().st_mode & 0o7777 == 0o1777
    inside.make_point("agent", file=True)
    assert (root / "agent").is_file()
    assert not (root / "agent").is_symlink()


def test_a_folder_that_is_not_empty_is_not_thrown_away(inside: RootFiles, root: Path) -> None:
    (root / "etc/resolv.conf/kept").mkdir(parents=True)
    (root / "etc/hosts").mkdir()
    with pytest.raises(OSError, match="not empty"):
        inside.write("/etc/resolv.conf", b"ours")
    inside.write("/etc/hosts", b"ours")
    assert (root / "etc/resolv.conf/kept").is_dir()


@pytest.mark.parametrize("path", ["/fifo", "/device", "/folder", "/large", "/missing", "/etc/..", "/loop"])
def test_only_regular_files_of_a_bounded_size_are_read(inside: RootFiles, root: Path, path: str) -> None:
    os.mkfifo(root / "fifo")
    os.mknod(root / "device", 0o020666, os.makedev(1, 5))  # zeros without end
    (root / "folder").mkdir()
    (root / "large").write_bytes(bytes(101))
    (root / "loop").symlink_to("loop")
    assert inside.read(path, 100) is None


@pytest.mark.parametrize("path", ["/etc/", "/etc/..", "/etc/.", ""])
def test_a_file_needs_a_name(inside: RootFiles, path: str) -> None:
    with pytest.raises(OSError, match="not the name"):
        inside.write(path, b"ours")


def test_owners_are_those_of_the_sandbox(root: Path) -> None:
    with RootFiles(root, 0x30000000) as inside:
        inside.write("/home/user/.profile", b"", owner=(1000, 1001), mode=0o4755)
    status = (root / "home/user/.profile").stat()
    assert (status.st_uid, status.st_gid) == (0x30000000 + 1000, 0x30000000 + 1001)
    assert status.st_mode & 0o7777 == 0o4755
    assert (root / "home").stat().st_uid == 0x30000000
