"""A sandbox's disk before anything runs on it: copied, given to its owners and mounted without a tool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine.local.disk import disk
from k8e.engine.local.disk.cleanup import unmount
from k8e.engine.local.disk.disk import mount_image
from k8e.engine.local.disk.inodes import UnknownLayout, read_stretches
from k8e.engine.local.system.tool import run_tool
from tests.engine.rig import read_host
from tests.engine.traces import mount_points

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

FIRST = 0x30000000 + 7 * 65536
# Sizes for which mkfs chooses blocks of 1 and of 4 KiB, and one with several groups.
SIZES = [(32 << 20, 1024), (128 << 20, 16_384), (2 << 30, 131_072)]


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """Some of everything that can be in an image, with owners all over the range."""
    top = tmp_path / "content"
    (top / "root/deep/er").mkdir(parents=True)
    for number in range(300):
        file = top / f"root/deep/{number}"
        file.write_bytes(os.urandom(number * 37))
        os.chown(file, number * 219 % 65536, number * 7919 % 65536)
    (top / "root/large").write_bytes(os.urandom(1 << 20))
    os.chown(top / "root/large", 65535, 65534)
    os.symlink("large", top / "root/link")
    os.link(top / "root/large", top / "root/hard")
    os.mkfifo(top / "root/fifo")
    os.chown(top / "root/deep/er", 1000, 1000)
    return top


@contextlib.contextmanager
def mounted(template: disk.Template, top: Path, first_id: int | None) -> Iterator[Path]:
    image, where = top / "disk.img", top / "disk"
    try:
        disk.mount_copy(template, image, where, first_id)
        yield where
    finally:
        assert unmount(where)
        where.rmdir()
        image.unlink()


def owners(top: Path) -> dict[str, tuple[int, int]]:
    found = {".": top.lstat(), **{str(path.relative_to(top)): path.lstat() for path in top.rglob("*")}}
    return {name: (status.st_uid, status.st_gid) for name, status in found.items()}


def loop_devices(image: Path) -> list[str]:
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    found = []
    for path in backing:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == str(image):
                found.append(path.parts[3])
    return found


@pytest.mark.parametrize(("size", "inodes"), SIZES)
async def test_every_file_belongs_to_the_same_one_in_another_range(
    content: Path, tmp_path: Path, size: int, inodes: int
) -> None:
    await disk.make_template(content, size, inodes, tmp_path / "t.img")
    template = disk.load_template(tmp_path / "t.img")
    assert template.inodes is not None
    with mounted(template, tmp_path, None) as where:
        plain = owners(where)
    assert {name: owner for name, owner in plain.items() if name.startswith("root/")} == {
        name: owner for name, owner in owners(content).items() if name.startswith("root/")
    }
    with mounted(template, tmp_path, FIRST) as where:
        assert owners(where) == {name: (FIRST + uid, FIRST + gid) for name, (uid, gid) in plain.items()}
        assert (where / "root/large").read_bytes() == (content / "root/large").read_bytes()
        assert (where / "root/hard").stat().st_nlink == 2
        assert await run_tool("e2fsck", "-fn", tmp_path / "disk.img", capture=True)


async def test_a_copy_is_as_sparse_as_its_template(content: Path, tmp_path: Path) -> None:
    await disk.make_template(content, 2 << 30, 131_072, tmp_path / "t.img")
    template = disk.load_template(tmp_path / "t.img")
    with mounted(template, tmp_path, FIRST):
        image, model = (tmp_path / "disk.img").stat(), (tmp_path / "t.img").stat()
        assert image.st_size == 2 << 30
        assert image.st_blocks <= model.st_blocks + 256
        assert image.st_mode & 0o777 == 0o600


async def test_of_another_layout_the_owners_are_changed_one_by_one(content: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.img"
    with template.open("wb") as file:
        file.truncate(64 << 20)
    await run_tool("mkfs.ext4", "-q", "-F", "-O", "metadata_csum", "-d", content, template)
    with pytest.raises(UnknownLayout):
        read_stretches(template)
    loaded = disk.load_template(template)
    assert loaded.inodes is None
    with mounted(loaded, tmp_path, FIRST) as where:
        moved = owners(where)
    expected = {
        name: (FIRST + uid, FIRST + gid) for name, (uid, gid) in owners(content).items() if name.startswith("root/")
    }
    assert {name: owner for name, owner in moved.items() if name.startswith("root/")} == expected
    assert moved["."] == (FIRST, FIRST)


@pytest.mark.parametrize("size", [0, 1024, 4096, 1 << 20])
def test_what_is_no_filesystem_is_told_apart(tmp_path: Path, size: int) -> None:
    file = tmp_path / "noise"
    file.write_bytes(os.urandom(size))
    with pytest.raises(UnknownLayout):
        read_stretches(file)


def test_what_cannot_be_mounted_leaves_no_loop_device(tmp_path: Path) -> None:
    image, where = tmp_path / "noise", tmp_path / "disk"
    image.write_bytes(os.urandom(1 << 20))
    where.mkdir()
    with pytest.raises(OSError, match="mount"):
        mount_image(image, where)
    assert loop_devices(image) == []
    assert str(where) not in mount_points()


async def test_a_mount_is_nosuid_nodev_and_noatime_and_its_device_goes_with_it(content: Path, tmp_path: Path) -> None:
    await disk.make_template(content, 32 << 20, 1024, tmp_path / "t.img")
    with mounted(disk.load_template(tmp_path / "t.img"), tmp_path, None) as where:
        lines = read_host("/proc/self/mountinfo").splitlines()
        (options,) = (line.split()[5] for line in lines if line.split()[4] == str(where))
        assert {"nosuid", "nodev", "noatime"} <= set(options.split(","))
        assert len(loop_devices(tmp_path / "disk.img")) == 1
    assert loop_devices(tmp_path / "disk.img") == []
