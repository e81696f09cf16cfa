"""Slots: places in a warm sandbox at which directories of the machine are mounted when it is claimed.

What is mounted in a shared mount is mounted in its slaves, too. A native sandbox has a slave at the very place where
the directory is to be, and sees it from one moment to the next. gVisor's kernel works from what it was handed at the
start and sees only what is mounted below that: so it has one small directory as a slave, the tray, in which the mounts
appear, and the agent binds them to their places (`list_bindings`), each kept part over itself as well, for gVisor's
kernel has to know those mount points. Until it does, nothing there can be written to. Then the tray is removed.

The mounts are put together as ever (mounts.py), where there is no slave, and passed on complete, in one call for each:
there is no moment at which a kept part could be changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from k8e.engine import EngineError, Mount, Shape
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.detached import cloned
from k8e.engine.local.mounts.kept_parts import pin_mounts
from k8e.engine.local.mounts.mounts import attach_mounts, seal_mounts
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import Bind
from k8e.engine.local.system.calls import (
    MNT_DETACH,
    MOUNT_ATTR_RDONLY,
    MS_NODEV,
    MS_NOSUID,
    PATH_OF_DIRECTORY,
    UMOUNT_NOFOLLOW,
    mount,
    mount_setattr,
    move_mount,
    opened,
    umount2,
)
from k8e.link.model import Identity

TRAY = "/run/k8e-slots"  # inside gVisor
_WORKSPACE = "/workspace"
_EMPTY = "empty"  # the directory at a target until its slot is filled


def cut_slots(paths: SandboxPaths, shape: Shape, *, native: bool) -> list[Bind]:
    """Makes them. Returns what the sandbox sees until they are filled: its own workspace, and empty directories."""
    paths.slots.mkdir(mode=0o711, exist_ok=True)
    paths.slots.chmod(0o711)  # whatever the umask is: root of a native sandbox is an unknown user here
    workspace = Bind(os.fspath(paths.workspace), _WORKSPACE, writable=not shape.read_only)
    if not native:
        return [workspace, *_make_tray(paths.slots, shape.slots)]
    binds = [] if _WORKSPACE in shape.slots else [workspace]
    for index, target in enumerate(shape.slots):
        point = paths.slots / str(index)
        point.mkdir(mode=0o755)
        with cloned(paths.workspace if target == _WORKSPACE else point) as tree:
            move_mount(tree, point)
            mount_setattr(tree, 0, shared=True)
        binds.append(Bind(os.fspath(point), target, target == _WORKSPACE and not shape.read_only, follows=True))
    return binds


def _make_tray(tray: Path, targets: Sequence[str]) -> Iterator[Bind]:
    """Read-only inside: an image's own interpreters are parked before it is filled, and could be there first, or rename
    a kept part before gVisor's kernel knows of it."""
    try:
        mount("k8e", tray, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=16,mode=0700")
    except OSError as error:
        raise EngineError("slots", f"no tmpfs for them: {error.strerror}") from error
    (tray / _EMPTY).mkdir(mode=0o755)
    with opened(tray, PATH_OF_DIRECTORY) as handle:
        mount_setattr(handle, 0, shared=True)
    for target in targets:
        if target != _WORKSPACE:
            yield Bind(os.fspath(tray / _EMPTY), target, writable=False)
    yield Bind(os.fspath(tray), TRAY, writable=False, follows=True)


def fill_slots(
    mounts: Sequence[Mount],
    layout: Layout,
    paths: SandboxPaths,
    record: Record,
    user: Identity,
    list_processes: Callable[[], Iterable[int]],
) -> Sequence[Bind]:
    """Mounts the directories, once: natively at their places, in gVisor on the tray. Returns what the sandbox sees now.
    `list_processes` lists all of the sandbox."""
    if not mounts or record.slots != tuple(each.target for each in mounts):
        raise EngineError("slots", f"the sandbox has slots for {', '.join(record.slots) or 'nothing'}")
    native = record.first_id is not None
    binds, sources = attach_mounts(mounts, layout, paths, record.first_id, user)
    replace(record, sources=sources, slots=()).save(paths.record)
    if not native:
        pin_mounts(mounts, paths, list_processes)
    points = [paths.slots / str(index) for index in range(len(mounts))]
    for index, point in enumerate(points):
        # Natively the slot is the shared mount, in gVisor the tray.
        with opened(point if native else paths.slots, PATH_OF_DIRECTORY) as shared:
            if not native:
                point.mkdir(mode=0o755)
            _pass_on(paths.mounts / f"mount-{index}", point)
            if native or point == points[-1]:
                mount_setattr(shared, MOUNT_ATTR_RDONLY, recursive=True)  # private again: it has no slave any more
    for point in (*points, paths.slots):
        _unmount(point)
    # The directories stay: to remove one would take away what is mounted on it anywhere, in the sandbox too.
    seal_mounts(paths)
    return binds


def _pass_on(source: Path, point: Path) -> None:
    """Mounts all of it at once, here and in the slaves."""
    with cloned(source, recursive=True) as tree:
        move_mount(tree, point)


def _unmount(point: Path) -> None:
    """A slot has two mounts, one over the other."""
    try:
        while True:
            umount2(point, MNT_DETACH | UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise EngineError("slots", f"{point} cannot be unmounted: {error.strerror}") from error


def list_bindings(binds: Sequence[Bind]) -> Iterator[tuple[bytes, bytes]]:
    """Lists what the agent in gVisor is to mount where, in order. All of it is read-only until all of it is there."""
    places: list[str] = []
    for bind in binds:
        source = bind.target  # a kept part, or on the way to one
        if not any(bind.target.startswith(f"{place}/") for place in places):
            source = f"{TRAY}/{len(places)}"
            places.append(bind.target)
        yield os.fsencode(source), os.fsencode(bind.target)
