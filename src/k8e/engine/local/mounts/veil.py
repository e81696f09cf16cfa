"""Hiding parts of a directory by their names: credentials in somebody's home.

Covering a file with another mount hides that file and not the name: programs that keep tokens replace theirs with a new
one every hour, and the new one would be seen. So what is shown is an overlay of two layers that nobody can write to.
The upper one, the veil, holds nothing but whiteouts, and says of each name that it does not exist: whatever comes to
have that name below, and whenever. As a side effect no socket in there can be spoken to.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from k8e.engine import EngineError, Mount
from k8e.engine.local.disk.loop import MS_NODEV, MS_NOSUID
from k8e.engine.local.mounts.kernel import attach_mount
from k8e.engine.local.mounts.owner import Owner, act_as
from k8e.engine.local.mounts.source import find_path, refusal

_MS_RDONLY = 1
_DETACH = 2
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off,nfs_export=off"
_libc = ctypes.CDLL(None, use_errno=True)


def resolve_hidden(mount: Mount, source: int, owner: Owner) -> list[tuple[str, ...]]:
    """The names below the directory that are to be hidden: those given, and where they lead to by links."""
    top = find_path(source)
    found: set[tuple[str, ...]] = set()
    for name in mount.hidden:
        for path in act_as(owner, lambda name=name: _follow(top, name)):  # type: ignore[misc]
            if f"{top}/".startswith(f"{path}/"):
                raise refusal(mount, f"{name}, which is to be hidden, leads to all of it", "Remove the link.")
            if path.startswith(f"{top}/"):
                found.add(tuple(path.removeprefix(f"{top}/").split("/")))
    return sorted(found)


def _follow(top: str, name: str) -> tuple[str, str]:
    """The name itself, in the directory that it is really in, and what is at the end of its links."""
    parent, _, last = name.rpartition("/")
    return os.path.join(os.path.realpath(os.path.join(top, parent)), last), os.path.realpath(os.path.join(top, name))


def draw_veil(mount: int, names: Iterable[Sequence[str]], veil: Path, aside: Path, target: Path) -> None:
    """Shows the mount at the target, without these names. `aside` is where it has to be for a moment."""
    attach_mount(mount, aside)
    try:
        below = os.open(aside, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _copy_owner(below, veil)
            for name in names:
                _white_out(below, veil, name)
            _mount_overlay(veil, below, target)
        finally:
            os.close(below)
    finally:
        _libc.umount2(os.fsencode(aside), _DETACH)  # the overlay has a copy of its own
    aside.rmdir()


def _white_out(below: int, veil: Path, name: Sequence[str]) -> None:
    """Copies the directories that lead there, and ends at the first step that is none: what is not there yet stays
    away as a whole."""
    opened: list[int] = []
    try:
        for step in name[:-1]:
            veil /= step
            if veil.is_symlink() or (veil.exists() and not veil.is_dir()):
                return  # hidden already
            try:
                below = os.open(step, _STEP | os.O_DIRECTORY, dir_fd=below)
            except OSError:
                break
            opened.append(below)
            veil.mkdir(exist_ok=True)
            _copy_owner(below, veil)
        else:
            veil /= name[-1]
        if veil.is_dir():
            raise EngineError("hidden names", f"{'/'.join(name)} is hidden, and something in it as well")
        if not veil.exists():
            os.mknod(veil, stat.S_IFCHR, 0)
    finally:
        for handle in opened:
            os.close(handle)


def _copy_owner(below: int, veil: Path) -> None:
    """A directory of both layers looks like the upper one. Its owner is seen through the mount, mapped as there."""
    status = os.fstat(below)
    os.chown(veil, status.st_uid, status.st_gid)
    veil.chmod(stat.S_IMODE(status.st_mode) & 0o777)


def _mount_overlay(veil: Path, below: int, target: Path) -> None:
    above = os.open(veil, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        options = f"{_OPTIONS},lowerdir=/proc/self/fd/{above}:/proc/self/fd/{below}".encode()
        flags = ctypes.c_ulong(_MS_RDONLY | MS_NOSUID | MS_NODEV)
        if _libc.mount(b"k8e", os.fsencode(target), b"overlay", flags, options) != 0:
            cause = f"the kernel does not lay a veil over it: {os.strerror(ctypes.get_errno())}"
            raise EngineError("hidden names", cause, "overlayfs on id-mapped mounts needs Linux 5.19 or later")
    finally:
        os.close(above)
