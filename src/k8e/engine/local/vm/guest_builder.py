"""Builds the guest of virtual machines: `k8e image build-guest`. Needs root, apt-get, dpkg-deb and mkfs.erofs.

The kernel is the distribution's, made for virtual machines. Its package is downloaded, which apt checks against the
distribution's signed lists, and unpacked without being installed: none of its scripts runs, and the machine's own
kernel and boot loader stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.local.roots import host_image
from k8e.engine.local.runtime.bundle import HostPath
from k8e.engine.local.system.tool import find_tool, run_tool
from k8e.engine.local.toolchain.registries import find_registries
from k8e.engine.local.vm.guest import HOST_DISK, KERNEL, KERNEL_ELF, MANIFEST, Guest, load_guest
from k8e.engine.local.vm.kernel import UnknownKernel, extract_elf

TOOLS_FOLDER: Final = Path("/var/lib/k8e/tools")
PACKAGE: Final = "linux-image-cloud-amd64"
# What the guest needs beyond what is built into the kernel (ext4, ACPI, the serial port). Others come as they depend.
_WANTED: Final = (
    *("virtio_mmio", "virtio_blk", "virtio_net", "virtio_console", "virtio_rng"),
    *("erofs", "overlay", "vmw_vsock_virtio_transport"),
)
_TOOLS: Final = {"apt-get": "apt", "dpkg-deb": "dpkg", "mkfs.erofs": "erofs-utils", "unshare": "util-linux"}
_UUID: Final = "6b386567-7565-7374-0000-000000000000"  # any, but always the same
_NO_XATTRS: Final = "-x-1"
_SCRATCH: Final = ".guest-"
_DEADLINE: Final = 1800.0
# The tree that becomes the disk is put together in a mount namespace that ends with the tool, whatever happens.
_MAKE_DISK: Final = """set -e
stage=$1 image=$2; shift 2
while [ "$1" != -- ]; do mount --bind "$1" "$stage$2"; mount -o remount,bind,ro "$stage$2"; shift 2; done
shift
exec mkfs.erofs "$@" "$image" "$stage"
"""


async def build_guest(
    folder: Path, host_paths: Sequence[HostPath], hidden: Sequence[str], without: Sequence[str] = ()
) -> Guest:
    """Replaces the guest in `folder` when the new one is complete. `hidden`: files that no sandbox is to see.
    `without`: directories below the `host_paths` that are left out."""
    for tool, name in _TOOLS.items():
        if find_tool(tool) is None:
            raise EngineError("guest", f"{tool} is not installed", f"apt-get install {name}")
    await asyncio.to_thread(_prepare_place, folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_SCRATCH) as scratch:
        made = Path(scratch, "guest")
        await asyncio.to_thread(made.mkdir)
        await _take_kernel(Path(scratch), made)
        excluded = [*without, *await asyncio.to_thread(_unreadable, host_paths, hidden)]
        await make_disk(made / HOST_DISK, host_paths, excluded)
        await asyncio.to_thread(_describe, made, [path.target for path in host_paths])
        await asyncio.to_thread(_put, made, folder)
    return await asyncio.to_thread(load_guest, folder)


def _prepare_place(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{_SCRATCH}*"):  # of one that was killed
        shutil.rmtree(left)


async def build_host_guest(folder: Path, without: Sequence[str]) -> Guest:
    """Builds it of what sandboxes of the image `host` see on this machine."""
    for path in without:
        if not path.startswith("/usr/") or ".." in path.split("/"):
            raise EngineError("guest", f"{path} is not below /usr, and is not on the disk anyway")
    registries = await find_registries()
    paths = await asyncio.to_thread(host_image.host_paths, TOOLS_FOLDER)
    return await build_guest(folder, paths, registries.hidden, without)


async def _take_kernel(scratch: Path, made: Path) -> None:
    """Takes the kernel and the modules out of the package that the distribution's name for its newest stands for."""
    listed = await run_tool("apt-cache", "depends", "--important", PACKAGE, capture=True)
    found = re.search(r"Depends: (linux-image-\S+)", listed)
    if found is None:
        raise EngineError("guest", f"apt does not know {PACKAGE}", "apt-get update")
    debs = scratch / "debs"
    await asyncio.to_thread(debs.mkdir, mode=0o755)
    # apt downloads into the directory that it is called in.
    await run_tool("env", "-C", debs, "apt-get", "-qq", "download", found[1], deadline=_DEADLINE)
    (deb,) = await asyncio.to_thread(os.listdir, debs)
    await run_tool("dpkg-deb", "-x", debs / deb, scratch / "root", deadline=120)
    version = await run_tool("dpkg-deb", "-f", debs / deb, "Version", capture=True)
    await asyncio.to_thread(_pick, scratch / "root", made, f"{found[1]} {version.strip()}")


def _pick(root: Path, made: Path, version: str) -> None:
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    shutil.copyfile(kernel, made / KERNEL)
    known = {path.stem.replace("-", "_"): path for path in (root / "lib/modules").rglob("*.ko")}
    order: list[str] = []
    for name in _WANTED:
        _add_module(name, known, order)
    for name in order:
        shutil.copyfile(known[name], made / f"{name}.ko")
    manifest: dict[str, object] = {"version": version, "modules": [f"{name}.ko" for name in order]}
    with contextlib.suppress(UnknownKernel):  # then there is no Firecracker with it
        elf = extract_elf(kernel.read_bytes())
        (made / KERNEL_ELF).write_bytes(elf)
        manifest["elf"] = {KERNEL_ELF: hashlib.sha256(elf).hexdigest()}
    (made / MANIFEST).write_text(json.dumps(manifest))


def _add_module(name: str, known: dict[str, Path], order: list[str]) -> None:
    """Those that it depends on first."""
    if name in order:
        return
    if name not in known:
        raise EngineError("guest", f"the kernel's package has no module {name}")
    depends = re.search(rb"\0depends=([^\0]*)\0", known[name].read_bytes())
    for each in depends[1].decode().split(",") if depends else ():
        if each:
            _add_module(each.replace("-", "_"), known, order)
    order.append(name)


async def make_disk(image: Path, host_paths: Sequence[HostPath], excluded: Sequence[str]) -> None:
    """Makes a read-only filesystem that has each source at its target."""
    with tempfile.TemporaryDirectory(prefix="k8e-stage-") as stage:
        words = await asyncio.to_thread(_lay_out, Path(stage), host_paths)
        options = [_NO_XATTRS, "-T0", "-U", _UUID, *(f"--exclude-path={each.lstrip('/')}" for each in excluded)]
        await run_tool(
            *("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _MAKE_DISK, "make-disk"),
            *(stage, os.fspath(image), *words, "--", *options),
            deadline=_DEADLINE,
        )


def _lay_out(stage: Path, host_paths: Sequence[HostPath]) -> list[str]:
    """Makes the mount points. Returns the pairs for the tool."""
    stage.chmod(0o755)
    for path in host_paths:
        (stage / path.target.lstrip("/")).mkdir(parents=True, mode=0o755)
    return [word for path in host_paths for word in (os.fspath(path.source), path.target)]


def _unreadable(host_paths: Sequence[HostPath], hidden: Sequence[str]) -> list[str]:
    """Lists what not all users of the machine may read, and what is hidden: the disk can be read by all of its VMMs."""
    found = [path for path in hidden if any(path.startswith(f"{each.target}/") for each in host_paths)]
    for each in host_paths:
        for path, status in _walk(each.source):
            needed = 0o005 if stat.S_ISDIR(status.st_mode) else 0o004
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & needed != needed:
                found.append(f"{each.target}/{path.relative_to(each.source)}")
    return found


def _walk(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, directories, files in os.walk(top):
        for name in (*directories, *files):
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                yield path, path.lstat()


def _describe(made: Path, targets: Sequence[str]) -> None:
    manifest = json.loads((made / MANIFEST).read_text())
    files = sorted(path for path in made.iterdir() if path.name not in (MANIFEST, HOST_DISK, KERNEL_ELF))
    manifest["files"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    disk = made / HOST_DISK
    disk.chmod(0o644)
    with disk.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    manifest["host"] = {"targets": list(targets), "size": disk.stat().st_size, "sha256": digest}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def _put(made: Path, folder: Path) -> None:
    """Virtual machines that run have the old files open. Between the two renames there is none: that is said, too."""
    made.chmod(0o700)  # what is on the disk is for sandboxes
    old = made.with_name("old")
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
