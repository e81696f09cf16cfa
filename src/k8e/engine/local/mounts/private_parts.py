"""Private parts: directories of the machine of which a sandbox has a copy of its own, such as a project's .git.

The copy is an overlay. Its lower layer is the machine's directory, id-mapped like the mount that it is a part of, and
never written to; its upper layer is a directory on the sandbox's own disk, so that changes count there, are kept when
the sandbox is stopped, and go with it. Nothing is copied ahead: a .git of gigabytes costs as much as an empty one. The
upper layer lies beside the root and not in it: no process inside sees it but through the overlay.

What the machine's user changes below meanwhile is seen inside where the sandbox has not changed it itself.

A sub-agent's copy is empty: only its parent's has the files that stand for those of the machine that no sandbox may
see, such as a configuration with credentials.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.system.calls import (
    MNT_DETACH,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    PATH_OF_DIRECTORY,
    mount,
    move_mount,
    opened,
    umount2,
)

_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off,nfs_export=off,xino=off"


def mount_whole(tree: int, layers: Path, aside: Path, target: Path, *, empty: bool) -> None:
    """Mounts a copy of the tree at the target. `aside` is where the tree has to be for a moment."""
    move_mount(tree, aside)
    try:
        with opened(aside, PATH_OF_DIRECTORY) as below:
            mount_private(below, layers, target, empty=empty)
    finally:
        umount2(aside, MNT_DETACH)  # the overlay has a copy of its own
    aside.rmdir()


def mount_over(below: int, layers: Path, *, empty: bool, writable: bool) -> None:
    """Mounts a copy of an open directory over that directory, by its descriptor: its name may mean another one by
    now."""
    mount_private(below, layers, Path(f"/proc/self/fd/{below}"), empty=empty, writable=writable)


def mount_private(below: int, layers: Path, target: Path, *, empty: bool, writable: bool = True) -> None:
    """`layers`: the copy's own directory on the sandbox's disk. A copy that was there before goes on. An empty one has
    only the owner and the mode of the directory below."""
    upper, work, nothing = layers / "upper", layers / "work", layers / "nothing"
    if not upper.exists():
        layers.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_upper(below, upper)
    work.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as files:
        above, scratch = (files.enter_context(opened(path, PATH_OF_DIRECTORY)) for path in (upper, work))
        if empty:
            nothing.mkdir(mode=0o700, exist_ok=True)
            below = files.enter_context(opened(nothing, PATH_OF_DIRECTORY))
        places = f"upperdir=/proc/self/fd/{above},workdir=/proc/self/fd/{scratch},lowerdir=/proc/self/fd/{below}"
        flags = MS_NOSUID | MS_NODEV | MS_NOATIME | (0 if writable else MS_RDONLY)
        try:
            mount("k8e", target, "overlay", flags, f"{_OPTIONS},{places}")
        except OSError as error:
            cause = f"the kernel does not mount a copy of it: {error.strerror}"
            raise EngineError(
                "private parts", cause, "overlayfs on id-mapped mounts needs Linux 5.19 or later"
            ) from error


def _make_upper(below: int, upper: Path) -> None:
    """A directory of both layers looks like the upper one. Its owner is as the id-mapped mount shows it."""
    status = os.fstat(below)
    draft = upper.with_name("new")
    draft.mkdir(mode=0o700, exist_ok=True)
    os.chown(draft, status.st_uid, status.st_gid)
    draft.chmod(stat.S_IMODE(status.st_mode) & 0o777)
    draft.rename(upper)
