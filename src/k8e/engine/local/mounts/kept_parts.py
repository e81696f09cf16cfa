"""Parts of a writable directory that cannot be changed from inside: a project's .git/config and hooks, which the
machine's git obeys.

Each is mounted over itself, read-only. That alone would not keep it in its place: its directory could be renamed and
another put there. So every directory on the way is mounted over itself as well, and what is a mount point cannot be
renamed, removed or replaced. That holds for every process that sees the mounts: the sandbox's, and those of the
machine's users for as long as the sandbox lives. To let them replace the file, the mount would have to go, in the
sandbox, too.

Linux refuses to rename or remove a mount point only to a process in whose own mount namespace it is one. gVisor's
sandbox process opens, renames and removes files of the project itself, through descriptors that its gofer hands it,
from a mount namespace with nothing in it. So kept parts are mounted there as well (`pin_mounts`), read-only, over the
root of that namespace, and the filter of that process knows no call to remove them: the machine's kernel refuses
gVisor's own processes what gVisor's kernel refuses its programs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from k8e.engine import EngineError, Mount
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.mounts.detached import cloned
from k8e.engine.local.mounts.private_parts import mount_over
from k8e.engine.local.mounts.source import refusal
from k8e.engine.local.system.calls import (
    CLONE_FS,
    CLONE_NEWNS,
    MOUNT_ATTR_RDONLY,
    PATH,
    PATH_OF_DIRECTORY,
    closing,
    mount_setattr,
    move_mount,
    opened,
    setns,
    unshare,
)
from k8e.engine.tasks import in_own_thread

_NAMESPACES = 2  # the gofer's, and that of the sandbox process


def keep_parts(mount: Mount, top: int, layers: Path, *, empty: bool) -> Iterator[tuple[str, bool]]:
    """Makes the kept parts mount points. `top` is open in the mount, where that is attached; copies of private parts
    have their own files in `layers`, and with `empty` no others. Yields each mount point, outer ones first, and whether
    it can still be written to."""
    names = {tuple(part.split("/")) for part in mount.kept}
    points: dict[tuple[str, ...], int] = {}
    with contextlib.ExitStack() as clones:
        for name in sorted(names):
            for length in range(1, len(name) + 1):
                point = name[:length]
                if any(point[:shorter] in names for shorter in range(1, length)):
                    break  # all of it is kept already
                if point in points:
                    continue
                if _mount_private(mount, points.get(point[:-1], top), point, layers, empty=empty):
                    yield "/".join(point), mount.writable
                    continue
                points[point] = clones.enter_context(_mount_over(mount, points.get(point[:-1], top), point))
                # A file on the way (.git in a worktree) is kept itself: it says where the way goes on.
                kept = point in names or not stat.S_ISDIR(os.fstat(points[point]).st_mode)
                if kept:
                    names.add(point)
                    mount_setattr(points[point], MOUNT_ATTR_RDONLY)
                yield "/".join(point), not kept


def _mount_private(mount: Mount, parent: int, point: tuple[str, ...], layers: Path, *, empty: bool) -> bool:
    """Mounts the sandbox's own copy over a directory that is private. False for any other: what is no directory is kept
    as it is (.git in a worktree)."""
    part = "/".join(point)
    if part not in mount.private:
        return False
    try:
        handle = os.open(point[-1], PATH_OF_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    except (NotADirectoryError, FileNotFoundError):
        return False
    with closing(handle) as found:
        mount_over(found, layers / str(mount.private.index(part)), empty=empty, writable=mount.writable)
    return True


@contextlib.contextmanager
def _mount_over(mount: Mount, parent: int, point: tuple[str, ...]) -> Iterator[int]:
    """Mounts a directory or file over itself; yields the mount that covers it."""
    with contextlib.ExitStack() as files:
        try:
            found = files.enter_context(opened(point[-1], PATH, folder=parent))
        except OSError as error:
            raise refusal(mount, f"{'/'.join(point)} cannot be kept as it is: {error.strerror}") from error
        kind = os.fstat(found).st_mode
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            what = "a link" if stat.S_ISLNK(kind) else "neither a directory nor a file"
            hint = f"Make {point[-1]} a directory or a file, or leave the folder out."
            raise refusal(mount, f"{'/'.join(point)} cannot be kept as it is: it is {what}", hint)
        copy = files.enter_context(cloned(found))
        move_mount(copy, found)
        yield copy


def pin_mounts(mounts: Sequence[Mount], paths: SandboxPaths, list_processes: Callable[[], Iterable[int]]) -> None:
    """Mounts kept parts in the mount namespaces of gVisor's own processes. `list_processes` lists all of the sandbox.
    In the gofer's namespace they are mount points already; once more does no harm there, so it does not matter which
    process is which."""
    writable = [index for index, mount in enumerate(mounts) if mount.writable]
    if not writable:
        return
    with contextlib.ExitStack() as files:
        namespaces = list(_open_namespaces(list_processes(), files))
        if len(namespaces) < _NAMESPACES:
            found = f"{len(namespaces)} of {_NAMESPACES} mount namespaces"
            raise EngineError("kept parts", f"they cannot be held against gVisor's own processes: {found} were found")
        try:
            for namespace in namespaces:
                _pin(namespace, [paths.mounts / f"mount-{index}" for index in writable])
        except OSError as error:
            raise EngineError("kept parts", f"they cannot be held against gVisor's own processes: {error}") from error


def _open_namespaces(processes: Iterable[int], files: contextlib.ExitStack) -> Iterator[int]:
    """Opens the mount namespaces that are not the daemon's, each once."""
    known = {os.stat("/proc/self/ns/mnt").st_ino}
    for process in processes:
        try:
            namespace = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # ended since it was listed
        if (inode := os.fstat(namespace).st_ino) in known:
            os.close(namespace)
        else:
            known.add(inode)
            files.callback(os.close, namespace)
            yield namespace


def _pin(namespace: int, sources: Sequence[Path]) -> None:
    """Attaches clones of the mounts over the root of a mount namespace; a mount is in one place, so each namespace gets
    its own."""
    with contextlib.ExitStack() as clones:
        trees = [clones.enter_context(cloned(source, MOUNT_ATTR_RDONLY, recursive=True)) for source in sources]
        in_own_thread(lambda: _attach(namespace, trees))


def _attach(namespace: int, trees: Sequence[int]) -> None:
    unshare(CLONE_FS)  # threads share their root and current directory, and setns refuses a thread that does
    setns(namespace, CLONE_NEWNS)
    with opened("/", PATH_OF_DIRECTORY) as root:
        for tree in trees:
            move_mount(tree, root)
