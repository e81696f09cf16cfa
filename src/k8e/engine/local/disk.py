"""The writable part of a sandbox: a file with an ext4 inside, so that bytes and inodes are limited exactly, by the
kernel, on any machine, and the same for every runtime.

Each is a sparse copy of a template that already holds the image's own files. mkfs.ext4 fills templates itself (-d), so
making one mounts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import time
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.mountinfo import read_mounts
from k8e.engine.local.tool import run_tool

MIN_DISK = 32 << 20
_UMOUNT_NOFOLLOW = 8
_BUSY_PAUSE = 0.01  # nothing tells when a mount stops being busy
_libc = ctypes.CDLL(None, use_errno=True)


async def make_template(content: Path, size: int, inodes: int, target: Path) -> None:
    """`content` becomes the filesystem's root directory. Appears under its name only when it is complete."""
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.truncate(size)
        await run_tool(
            *("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(inodes), "-O", "^has_journal,^resize_inode"),
            *("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, partial),
            deadline=120,
        )
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


async def mount_copy(template: Path, image: Path, where: Path) -> None:
    await run_tool("cp", "--sparse=always", "--reflink=auto", template, image)
    os.mkdir(where, 0o711)
    # noatime: reading must not write. nosuid, nodev: whatever a sandbox puts there stays data to the host.
    await run_tool("mount", "-o", "loop,nosuid,nodev,noatime", image, where)


def mounts_below(top: Path) -> list[Path]:
    """Mount points at and below a directory, the innermost first."""
    found = [mount.point for mount in read_mounts() if mount.point == top or top in mount.point.parents]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def unmount(point: Path) -> bool:
    """False while somebody is still using it."""
    if _libc.umount2(os.fsencode(point), _UMOUNT_NOFOLLOW) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.EBUSY:
        return False
    if error == errno.EINVAL:
        return True  # not mounted any more
    raise EngineError("disk", f"{point} cannot be unmounted: {os.strerror(error)}")


async def unmount_below(top: Path, deadline: float = 10.0) -> None:
    """A process that is dying, perhaps one that a killed runtime left, can hold a mount for a moment longer."""
    end = time.monotonic() + deadline
    while points := await asyncio.to_thread(mounts_below, top):
        busy = [point for point in points if not await asyncio.to_thread(unmount, point)]
        if busy and time.monotonic() > end:
            raise EngineError("disk", f"{busy[0]} is still in use after {deadline:g} s")
        if busy:
            await asyncio.sleep(_BUSY_PAUSE)


def remove_tree(top: Path) -> None:
    """Removes a sandbox's directory. Nothing is mounted there any more, so what a sandbox wrote is inside the image."""
    if mounts_below(top):
        raise EngineError("disk", f"{top} still has mounts")
    with contextlib.suppress(FileNotFoundError):
        for parent, directories, files, handle in os.fwalk(top, topdown=False, follow_symlinks=False):
            for name in files:
                os.unlink(name, dir_fd=handle)
            for name in directories:
                if os.path.islink(os.path.join(parent, name)):
                    os.unlink(name, dir_fd=handle)
                else:
                    os.rmdir(name, dir_fd=handle)
        top.rmdir()


def shift_owners(top: Path, first_id: int) -> None:
    """Moves everything below into a sandbox's own range of ids. Nothing runs there yet."""
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        for name in (*directories, *files):
            status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            os.chown(name, first_id + status.st_uid, first_id + status.st_gid, dir_fd=handle, follow_symlinks=False)
    os.chown(top, first_id, first_id)
