"""The veil: hides parts of a directory by their names, such as credentials in a user's home.

Covering a file with another mount hides that file and not the name: programs that keep tokens replace theirs with a new
one every hour, and the new one would be seen. So the sandbox sees an overlay of two layers that cannot be written to.
The upper one, the veil, holds nothing but whiteouts, and says of each name that it does not exist: whatever has that
name below, and whenever. As a side effect no socket in there can be connected to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from k8e.engine import EngineError, Mount
from k8e.engine.local.mounts.source import Owner, act_as, find_path, refusal
from k8e.engine.local.system.calls import (
    MNT_DETACH,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    PATH_OF_DIRECTORY,
    mount,
    move_mount,
    opened,
    umount2,
)

_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off,nfs_export=off"


def resolve_hidden(wanted: Mount, source: int, owner: Owner) -> list[tuple[str, ...]]:
    """Finds the names below the directory that are to be hidden: those given, and where they lead to by links."""
    top = find_path(source)
    found: set[tuple[str, ...]] = set()
    for name in wanted.hidden:
        for path in act_as(owner, lambda name=name: _follow(top, name)):  # type: ignore[misc]
            if f"{top}/".startswith(f"{path}/"):
                raise refusal(wanted, f"{name}, which is to be hidden, leads to all of it", "Remove the link.")
            if path.startswith(f"{top}/"):
                found.add(tuple(path.removeprefix(f"{top}/").split("/")))
    return sorted(found)


def _follow(top: str, name: str) -> tuple[str, str]:
    """Returns the name itself, in the directory that it is really in, and what is at the end of its links."""
    parent, _, last = name.rpartition("/")
    return os.path.join(os.path.realpath(os.path.join(top, parent)), last), os.path.realpath(os.path.join(top, name))


def mount_veil(tree: int, names: Iterable[Sequence[str]], veil: Path, aside: Path, target: Path) -> None:
    """Mounts the tree at the target, without these names. `aside` is where the tree has to be for a moment."""
    move_mount(tree, aside)
    try:
        with opened(aside, os.O_PATH | os.O_DIRECTORY) as below:
            _copy_owner(below, veil)
            for name in names:
                _white_out(below, veil, name)
            _mount_overlay(veil, below, target)
    finally:
        umount2(aside, MNT_DETACH)  # the overlay has a copy of its own
    aside.rmdir()


def _white_out(below: int, veil: Path, name: Sequence[str]) -> None:
    """Copies the directories that lead to the name, and ends at the first step that is none: what does not exist yet is
    hidden as a whole."""
    with ExitStack() as files:
        for step in name[:-1]:
            veil /= step
            if veil.is_symlink() or (veil.exists() and not veil.is_dir()):
                return  # hidden already
            try:
                below = files.enter_context(opened(step, PATH_OF_DIRECTORY, folder=below))
            except OSError:
                break
            veil.mkdir(exist_ok=True)
            _copy_owner(below, veil)
        else:
            veil /= name[-1]
        if veil.is_dir():
            raise EngineError("hidden names", f"{'/'.join(name)} is hidden, and something in it as well")
        if not veil.exists():
            os.mknod(veil, stat.S_IFCHR, 0)


def _copy_owner(below: int, veil: Path) -> None:
    """A directory of both layers looks like the upper one. Its owner is seen through the mount, mapped as there."""
    status = os.fstat(below)
    os.chown(veil, status.st_uid, status.st_gid)
    veil.chmod(stat.S_IMODE(status.st_mode) & 0o777)


def _mount_overlay(veil: Path, below: int, target: Path) -> None:
    with opened(veil, os.O_PATH | os.O_DIRECTORY) as above:
        options = f"{_OPTIONS},lowerdir=/proc/self/fd/{above}:/proc/self/fd/{below}"
        try:
            mount("k8e", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, options)
        except OSError as error:
            cause = f"the kernel does not lay a veil over it: {error.strerror}"
            hint = "overlayfs on id-mapped mounts needs Linux 5.19 or later"
            raise EngineError("hidden names", cause, hint) from error
