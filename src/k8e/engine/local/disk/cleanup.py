"""Removing what a sandbox leaves: its mounts, its directory, and files that were in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.system.calls import DIRECTORY, UMOUNT_NOFOLLOW, opened, read_mounts_below, umount2
from k8e.engine.tasks import finish_in_thread

_BUSY_PAUSE = 0.01  # nothing tells when a mount stops being busy


def mounts_below(top: Path) -> list[Path]:
    """Lists the mount points at and below a directory, the innermost first."""
    return sorted(read_mounts_below(top), key=lambda path: len(path.parts), reverse=True)


def unmount(point: Path) -> bool:
    """False while a process is still using it."""
    try:
        umount2(point, UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno != errno.EINVAL:  # which says that it is not mounted any more
            raise EngineError("disk", f"{point} cannot be unmounted: {error.strerror}") from error
    return True


async def unmount_below(top: Path, deadline: float = 10.0) -> None:
    """A process that is dying, perhaps one that a killed runtime left, can hold a mount for a moment longer."""
    end = time.monotonic() + deadline
    while busy := await finish_in_thread(unmount_all, top):
        if time.monotonic() > end:
            raise EngineError("disk", f"{busy[0]} is still in use after {deadline:g} s")
        await asyncio.sleep(_BUSY_PAUSE)


def unmount_all(top: Path) -> list[Path]:
    """Unmounts what is not in use, also what came to light below something else. Returns what is in use."""
    while points := mounts_below(top):
        if busy := [point for point in points if not unmount(point)]:
            return busy
    return []


def remove_mount_points(folder: Path) -> None:
    """Removes them one by one, and only if they are empty: behind them were directories of the machine's users. If one
    were still mounted there, this would fail and remove nothing."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            os.rmdir(folder / name)
        os.rmdir(folder)


def remove_tree(top: Path) -> None:
    """Removes a sandbox's directory. Nothing is mounted there any more: what the sandbox wrote is inside the image."""
    if mounts_below(top):
        raise EngineError("disk", f"{top} still has mounts")
    for folder in (SandboxPaths(top).mounts, SandboxPaths(top).slots):
        remove_mount_points(folder)
    if not top.is_dir() or top.is_symlink():
        top.unlink(missing_ok=True)  # it never was a sandbox
        return
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


def empty_folder(path: Path, owner: int) -> None:
    """Makes a folder on a sandbox's disk as it was at first: empty, owned by root of the sandbox, closed to its other
    users.

    Root of the sandbox may have left anything there: links that lead out of it, folders a thousand deep, pipes. Nothing
    runs there now, so nothing changes meanwhile. Still nothing is followed or waited for, and no depth is too deep.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    with opened(path, DIRECTORY) as folder:
        while names := os.listdir(folder):
            for name in names:
                _remove(folder, name)
        os.fchown(folder, owner, owner)
        os.fchmod(folder, 0o700)


def _remove(folder: int, name: str) -> None:
    """A folder's content is moved up first: however deep it is, two descriptors are enough."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    with opened(name, DIRECTORY, folder=folder) as below:
        for each in os.listdir(below):
            os.rename(each, secrets.token_hex(16), src_dir_fd=below, dst_dir_fd=folder)
    os.rmdir(name, dir_fd=folder)
