"""Parts of a writable directory that cannot be changed from inside: a project's .git/config and hooks, which the host's
git obeys.

Each is mounted over itself, read-only. That alone would not keep it in its place: its directory could be renamed and
another put there. So every directory on the way is mounted over itself as well, and what is a mount point cannot be
renamed, removed or replaced. That holds for whoever sees the mounts: the sandbox, and the machine's users for as long
as it lives. For them to be able to replace the file would be to take the mount away, in the sandbox, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from k8e.engine import Mount
from k8e.engine.local.mounts.kernel import RDONLY, attach_mount, change_mount, clone_mount
from k8e.engine.local.mounts.source import refusal

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def keep_parts(mount: Mount, top: int) -> Iterator[tuple[str, bool]]:
    """`top` is open in the mount, where that is attached. Yields what is a mount point now, outer ones first, and
    whether it can still be written to."""
    names = {tuple(part.split("/")) for part in mount.kept}
    points: dict[tuple[str, ...], int] = {}
    try:
        for name in sorted(tuple(part.split("/")) for part in mount.kept):
            for length in range(1, len(name) + 1):
                point = name[:length]
                if any(point[:shorter] in names for shorter in range(1, length)):
                    break  # all of it is kept already
                if point in points:
                    continue
                points[point] = _mount_over(mount, points.get(point[:-1], top), point)
                # What is a file on the way (.git in a worktree) is kept itself: it says where the way goes on.
                kept = point in names or not stat.S_ISDIR(os.fstat(points[point]).st_mode)
                if kept:
                    names.add(point)
                    change_mount(points[point], RDONLY)
                yield "/".join(point), not kept
    finally:
        for handle in points.values():
            os.close(handle)


def _mount_over(mount: Mount, parent: int, point: tuple[str, ...]) -> int:
    """The mount that now covers it, open."""
    try:
        found = os.open(point[-1], _STEP, dir_fd=parent)
    except OSError as error:
        raise refusal(mount, f"{'/'.join(point)} cannot be kept as it is: {error.strerror}") from error
    try:
        kind = os.fstat(found).st_mode
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            what = "a link" if stat.S_ISLNK(kind) else "neither a directory nor a file"
            raise refusal(mount, f"{'/'.join(point)} cannot be kept as it is: it is {what}")
        copy = clone_mount(found)
        try:
            attach_mount(copy, found)
        except BaseException:
            os.close(copy)
            raise
        return copy
    finally:
        os.close(found)
