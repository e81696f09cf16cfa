"""Layers as they lie on disk: what an archive says, in the form that overlayfs reads, and nothing anywhere else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.local.images import LocalImages, Store
from k8e.engine.local.images.layers import unpack, unpack_file
from k8e.engine.local.images.limits import ImageLimits
from k8e.engine.local.layout import Layout
from tests.images.builder import Docker, build, compress, entry, link, make_tar, write_layout
from tests.images.conftest import ignore

Entries = list[tuple[tarfile.TarInfo, bytes]]


@contextlib.contextmanager
def merged(layers: tuple[Path, ...], scratch: Path) -> Iterator[Path]:
    """All of them together, as the kernel sees them."""
    top = scratch / "merged"
    top.mkdir()
    lower = ":".join(str(layer) for layer in reversed(layers))
    empty = scratch / "empty"
    empty.mkdir()
    options = f"lowerdir={lower}:{empty}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(top)], check=True)
    try:
        yield top
    finally:
        assert ctypes.CDLL(None).umount2(os.fsencode(top), 2) == 0


async def add_layers(images: LocalImages, folder: Path, *layers: bytes, how: str = "gzip") -> tuple[Path, ...]:
    image = await images.add(write_layout(folder / "image.tar", build(*layers, how=how)), ignore)
    return images.store.layers_of(image.digest)


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
async def test_files_arrive_with_their_bytes_owners_modes_and_times(
    images: LocalImages, tmp_path: Path, how: str
) -> None:
    layer = make_tar(
        entry("./"),
        entry("./bin", mode=0o711, uid=3, gid=4, mtime=1_500_000_000),
        entry("bin/tool", b"#!" * 5000, mode=0o4755, uid=5, gid=6),
        entry("bin/group", b"x", mode=0o2755, gid=42),
        link("bin/same", "bin/tool", tarfile.LNKTYPE),
        link("bin/elsewhere", "/etc/shadow"),
        entry("deep/er/file", b"", uid=70_000),
        entry("pipe", type=tarfile.FIFOTYPE, mode=0o600),
        entry("n\udcffame", b"odd"),
        entry("bin/later", b"one"),
        entry("bin/later", b"another"),
    )
    (top,) = await add_layers(images, tmp_path, layer, how=how)
    folder, tool = (top / "bin").lstat(), (top / "bin/tool").lstat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid, folder.st_gid, folder.st_mtime) == (0o711, 3, 4, 1_500_000_000)
    assert (stat.S_IMODE(tool.st_mode), tool.st_uid, tool.st_gid) == (0o4755, 5, 6)
    assert (tool.st_nlink, tool.st_mtime) == (2, 1_600_000_000)
    assert (top / "bin/same").samefile(top / "bin/tool")
    assert (top / "bin/tool").read_bytes() == b"#!" * 5000
    assert stat.S_IMODE((top / "bin/group").stat().st_mode) == 0o2755
    assert os.readlink(top / "bin/elsewhere") == "/etc/shadow"
    assert (top / "deep/er").stat().st_uid == 0
    assert (top / "deep/er/file").stat().st_uid == 70_000
    assert stat.S_ISFIFO((top / "pipe").lstat().st_mode)
    assert (top / os.fsdecode(b"n\xffame")).read_bytes() == b"odd"
    assert (top / "bin/later").read_bytes() == b"another"


async def test_nobody_else_can_walk_in(images: LocalImages, layout: Layout, tmp_path: Path) -> None:
    await add_layers(images, tmp_path, make_tar(entry("su", b"x", mode=0o4755)))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (layout.layers, layout.oci)] == [0o700, 0o700]


async def test_what_a_layer_removes_or_replaces_is_gone_in_the_whole(images: LocalImages, tmp_path: Path) -> None:
    lower = make_tar(
        entry("gone", b"1"),
        entry("stays", b"1"),
        entry("emptied/a", b"1"),
        entry("emptied/deep/b", b"1"),
        entry("swapped/old", b"1"),
        entry("replaced/old", b"1"),
        entry("also/old", b"1"),
        entry("kept/old", b"1"),
    )
    upper = make_tar(
        entry(".wh.gone", b""),
        entry(".wh.never-was", b""),
        entry("emptied/.wh..wh..opq", b""),
        entry("emptied/new", b"2"),
        entry(".wh.swapped", b""),
        entry("swapped", b"now a file"),
        entry(".wh.replaced", b""),
        entry("replaced/new", b"2"),
        entry("also/new", b"2"),
        entry(".wh.also", b""),
        entry("kept/new", b"2"),
        entry(".wh..wh.plnk", b""),
    )
    layers = await add_layers(images, tmp_path, lower, upper)
    assert len(layers) == 2
    with merged(layers, tmp_path) as top:
        found = {str(path.relative_to(top)) for path in top.rglob("*") if not path.is_dir()}
        assert (top / "swapped").read_bytes() == b"now a file"
    assert found == {"stays", "emptied/new", "swapped", "replaced/new", "also/new", "kept/new", "kept/old"}


async def test_a_layer_that_replaces_everything_leaves_nothing_below(images: LocalImages, tmp_path: Path) -> None:
    layers = await add_layers(
        images, tmp_path, make_tar(entry("old", b"1")), make_tar(entry(".wh..wh..opq", b""), entry("new", b"2"))
    )
    assert [sorted(os.listdir(layer)) for layer in layers] == [["new"]]


async def test_a_layer_that_occurs_twice_is_mounted_once(images: LocalImages, tmp_path: Path) -> None:
    """The kernel refuses to have one directory at two places of a stack, and images do have the same layer twice."""
    one, other = make_tar(entry("a", b"1"), entry(".wh.b", b"")), make_tar(entry("b", b"2"))
    layers = await add_layers(images, tmp_path, one, other, one)
    with merged(layers, tmp_path) as top:
        assert sorted(os.listdir(top)) == ["a"]


def bomb(entries: int) -> bytes:
    return make_tar(*(entry(f"{number}", b"") for number in range(entries)))


HOSTILE: dict[str, tuple[Entries, str]] = {
    "dots": ([entry("../../evil", b"x")], "leads out"),
    "dots in the middle": ([entry("a/../../evil", b"x")], "leads out"),
    "absolute": ([entry("/etc/evil", b"x")], "absolute"),
    "through a link": ([link("a", "/tmp"), entry("a/evil", b"x")], "no directory"),
    "through a relative link": ([link("a", "../../.."), entry("a/evil", b"x")], "no directory"),
    "through a link to a directory of the layer": ([entry("b"), link("a", "b"), entry("a/x", b"x")], "no directory"),
    "deep through a link": ([entry("d"), link("d/a", "/"), entry("d/a/tmp/evil", b"x")], "no directory"),
    "through a file": ([entry("a", b"x"), entry("a/b", b"x")], "no directory"),
    "directory over a link, then through it": (
        [link("a", "/tmp"), entry("a"), link("b", "/tmp"), entry("b/x", b"")],
        "no directory",
    ),
    "hard link out": ([link("a", "../../../etc/passwd", tarfile.LNKTYPE)], "leads out"),
    "hard link to an absolute path": ([link("a", "/etc/passwd", tarfile.LNKTYPE)], "absolute"),
    "hard link to nothing": ([link("a", "nothing", tarfile.LNKTYPE)], "not in the layer"),
    "hard link through a link": ([link("d", "/etc"), link("a", "d/passwd", tarfile.LNKTYPE)], "no directory"),
    "hard link to a directory": ([entry("d"), link("a", "d", tarfile.LNKTYPE)], "directory"),
    "hard link to a removed file": ([entry(".wh.x", b""), link("a", "x", tarfile.LNKTYPE)], "not in the layer"),
    "character device": ([entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "device"),
    "block device": ([entry("disk", type=tarfile.BLKTYPE, devmajor=254, devminor=0)], "device"),
    "the device that means removed": ([entry("x", type=tarfile.CHRTYPE, devmajor=0, devminor=0)], "device"),
    "whiteout of dots": ([entry(".wh...", b"")], "no name"),
    "whiteout of nothing": ([entry(".wh.", b"")], "no name"),
    "whiteout through a link": ([link("a", "/tmp"), entry("a/.wh.x", b"")], "no directory"),
    "opaque through a link": ([link("a", "/tmp"), entry("a/.wh..wh..opq", b"")], "no directory"),
    "file over a directory": ([entry("d"), entry("d/x", b""), entry("d", b"file")], "directory and something else"),
    "root as a link": ([link(".", "/tmp")], "root of the layer"),
    "root as a file": ([entry("./", b"x")], "root of the layer"),
    "long name": ([entry("n" * 256, b"x")], "too long"),
    "long path": ([entry("/".join(["n" * 200] * 21)[:-1].strip("/"), b"x")], "too long"),
    "deep": ([entry("/".join(["d"] * 600), b"x")], "deeper"),
    "unknown type": ([entry("x", type=b"Z")], "unknown type"),
    "sparse": ([entry("x", type=tarfile.GNUTYPE_SPARSE)], ""),
    "impossible owner": ([entry("x", b"", uid=1 << 40)], "cannot be"),
    "negative owner": ([entry("x", b"", uid=-5)], "cannot be"),
    "negative size": ([entry("x", type=tarfile.REGTYPE, pax_headers={"size": "-512"})], ""),
    "longer than the archive": ([entry("x", type=tarfile.REGTYPE, pax_headers={"size": "99999999"})], ""),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_layers_are_refused_and_leave_nothing(
    images: LocalImages, layout: Layout, tmp_path: Path, name: str
) -> None:
    entries, cause = HOSTILE[name]
    before = set(os.listdir("/tmp"))
    with pytest.raises(EngineError) as caught:
        await add_layers(images, tmp_path, make_tar(entry("first", b"harmless"), *entries))
    assert caught.value.control == "image"
    assert cause in caught.value.cause
    assert os.listdir(layout.layers) == []
    assert os.listdir(layout.oci / "work") == []
    assert await images.list() == []
    assert "evil" not in set(os.listdir("/tmp")) - before


async def test_bombs_are_refused(layout: Layout, tmp_path: Path) -> None:
    limits = ImageLimits(bytes=8 << 20, entries=1000, ratio_from=1 << 20, ratio=50)
    images = LocalImages(layout, store=Store(layout, fresh=0), limits=limits)
    zeros = make_tar(entry("zeros", bytes(4 << 20)))
    for layer, how, cause in (
        (bomb(1001), "plain", "entries"),
        (make_tar(entry("a", os.urandom(5 << 20)), entry("b", os.urandom(5 << 20))), "plain", "bytes"),
        (zeros, "gzip", "times as many"),
        (zeros, "zstd", "times as many"),
    ):
        with pytest.raises(EngineError, match=cause):
            await add_layers(images, tmp_path, layer, how=how)
    assert os.listdir(layout.layers) == []
    await add_layers(images, tmp_path, zeros, how="plain")  # which is what it says it is


async def test_damaged_layers_are_refused(images: LocalImages, tmp_path: Path) -> None:
    good = make_tar(entry("a", os.urandom(3000)), entry("b", b"2"))
    broken = bytearray(good)
    broken[512 * 7 + 148] ^= 0xFF  # the checksum of the second header
    with pytest.raises(EngineError, match="damaged"):
        await add_layers(images, tmp_path, bytes(broken), how="plain")
    for how in ("gzip", "zstd"):
        packed = compress(good, how)
        image = build(good, how=how)
        cut = replace(image, blobs={**image.blobs, image.layers[0]: packed[:-20]})
        with pytest.raises(EngineError, match="decompressed"):
            await images.add(write_layout(tmp_path / "cut.tar", cut), ignore)


@pytest.mark.parametrize("name", [".wh..wh..opq", ".wh.x", ".wh..wh.aufs", "directory"])
async def test_an_entry_that_claims_a_giant_size_is_refused(images: LocalImages, tmp_path: Path, name: str) -> None:
    """tarfile skips what an entry claims to have, also beyond the end of the archive: years of turning in a circle."""
    kind = tarfile.DIRTYPE if name == "directory" else tarfile.REGTYPE
    giant = bytearray(make_tar(entry(name, type=kind)))
    giant[124:136] = b"\x80" + (1 << 85).to_bytes(11, "big")
    giant[148:156] = b" " * 8
    giant[148:156] = b"%06o\0 " % sum(giant[:512])
    with pytest.raises(EngineError, match="bytes"):
        await add_layers(images, tmp_path, bytes(giant), how="plain")


def test_a_layer_that_keeps_the_unpacker_busy_for_too_long_is_refused(tmp_path: Path) -> None:
    class Endless:
        def read(self, size: int, /) -> bytes:
            return block * (size // len(block))

    block = make_tar(entry("same"))[:512]
    with pytest.raises(EngineError, match="processor time") as caught:
        unpack(Endless(), 1 << 30, tmp_path, ImageLimits(seconds=1), threading.Event(), lambda _: None)
    assert caught.value.reason == "refused"


async def test_docker_archives_of_old_have_links_between_layers(images: LocalImages, tmp_path: Path) -> None:
    one, other = make_tar(entry("a", b"1")), make_tar(entry("b", b"2"))
    config = {
        "Env": ["A=1", "B=x=y", "A=2", "=no", "bad name=1"],
        "User": "daemon:staff",
        "WorkingDir": "/srv",
        "Entrypoint": ["/bin/tool", "--flag"],
        "Cmd": ["serve"],
    }
    archive = Docker([one, other, one], config, ["demo:1", "demo:latest"]).write(tmp_path / "docker.tar")
    image = await images.add(archive, ignore)
    assert (image.env, image.user, image.workdir) == ((("A", "2"), ("B", "x=y")), "daemon:staff", "/srv")
    assert (image.entrypoint, image.command) == (("/bin/tool", "--flag"), ("serve",))
    assert (image.names, image.size) == (("demo:1", "demo:latest"), 2)
    assert await images.find(image.digest) == image
    assert [sorted(os.listdir(layer)) for layer in images.store.layers_of(image.digest)] == [["b"], ["a"]]
    (tmp_path / "docker.tar.gz").write_bytes(compress(archive.read_bytes(), "gzip"))
    assert await images.add(tmp_path / "docker.tar.gz", ignore) == image


async def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "small"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", state], check=True)  # noqa: ASYNC221
    try:
        layout = Layout(state, tmp_path / "r")
        images = LocalImages(layout, store=Store(layout, fresh=0))
        large = write_layout(tmp_path / "large.tar", build(make_tar(entry("f", os.urandom(6 << 20))), how="plain"))
        with pytest.raises(EngineError) as caught:
            await images.add(large, ignore)
        assert (caught.value.reason, "prune" in caught.value.hint) == ("disk_full", True)

        async def pieces() -> AsyncIterator[bytes]:
            yield large.read_bytes()

        with pytest.raises(EngineError) as caught:
            await images.take(pieces(), ignore)
        assert caught.value.reason == "disk_full"
        assert os.listdir(layout.layers) == os.listdir(layout.oci / "work") == []
        small = write_layout(tmp_path / "small.tar", build(make_tar(entry("f", os.urandom(1 << 20)))))
        assert (await images.add(small, ignore)).size == 1 << 20
    finally:
        assert ctypes.CDLL(None).umount2(os.fsencode(state), 2) == 0


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_what_follows_the_end_of_a_packed_layer_is_refused(tmp_path: Path, how: str) -> None:
    packed = tmp_path / "layer"
    packed.write_bytes(compress(make_tar(entry("a", b"1")), how) + b"and something else")
    (tmp_path / "top").mkdir()
    with packed.open("rb") as file, pytest.raises(EngineError, match="decompressed"):
        unpack_file(file, packed.stat().st_size, tmp_path / "top", ImageLimits(), threading.Event(), lambda _: None)
