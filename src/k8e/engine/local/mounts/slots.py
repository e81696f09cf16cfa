"""Places in a sandbox for directories of the machine that nobody has named yet: cut when it is made ahead, filled when
it becomes somebody's.

What is mounted where the machine shares a mount is mounted in whoever follows that one, too. A native sandbox follows
at the very place where the directory is to be, and has it from one moment to the next. gVisor's kernel works from what
it was handed at the start and sees only what is mounted below that: so it follows one small directory, the tray, in
which the mounts appear, and the agent binds them to their places there (`list_bindings`), each kept part over itself as
well, for gVisor's kernel has to know those mount points. Until it does, nothing there can be written to. Then the tray
is gone.

The mounts are put together as ever (view.py), where nobody follows, and passed on complete, in one call for each: there
is no moment at which a part of one could be changed that is to be kept.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from k8e.engine import EngineError, Mount, Shape
from k8e.engine.local.disk.loop import MS_NODEV, MS_NOSUID
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.kernel import RDONLY, attach_mount, change_mount, clone_mount
from k8e.engine.local.mounts.pinning import pin_mounts
from k8e.engine.local.mounts.view import seal_mounts, show_mounts
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import Bind
from k8e.link.model import Identity

TRAY = "/run/k8e-slots"  # inside gVisor
_WORKSPACE = "/workspace"
_EMPTY = "empty"  # what is at a target until then
_DETACH = 2 | 8  # and no link is followed
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def cut_slots(paths: SandboxPaths, shape: Shape, *, native: bool) -> list[Bind]:
    """What the sandbox sees until they are filled: its own workspace, and empty directories."""
    paths.slots.mkdir(mode=0o711, exist_ok=True)
    paths.slots.chmod(0o711)  # whatever the umask is: root of a native sandbox is nobody here
    workspace = Bind(os.fspath(paths.workspace), _WORKSPACE, writable=not shape.read_only)
    if not native:
        return [workspace, *_lay_tray(paths.slots, shape.slots)]
    binds = [] if _WORKSPACE in shape.slots else [workspace]
    for index, target in enumerate(shape.slots):
        point = paths.slots / str(index)
        point.mkdir(mode=0o755)
        _share(paths.workspace if target == _WORKSPACE else point, point)
        binds.append(Bind(os.fspath(point), target, target == _WORKSPACE and not shape.read_only, follows=True))
    return binds


def _lay_tray(tray: Path, targets: Sequence[str]) -> Iterator[Bind]:
    """Read-only inside: an image's own interpreters are parked before it is filled, and could be there first, or rename
    what is to be kept before gVisor's kernel knows of it."""
    options = b"size=4k,nr_inodes=16,mode=0700"
    if _libc.mount(b"k8e", os.fsencode(tray), b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options) != 0:
        raise EngineError("slots", f"no tmpfs for them: {os.strerror(ctypes.get_errno())}")
    (tray / _EMPTY).mkdir(mode=0o755)
    handle = os.open(tray, _FOLDER)
    try:
        change_mount(handle, 0, shared=True)
    finally:
        os.close(handle)
    for target in targets:
        if target != _WORKSPACE:
            yield Bind(os.fspath(tray / _EMPTY), target, writable=False)
    yield Bind(os.fspath(tray), TRAY, writable=False, follows=True)


def _share(source: Path, point: Path) -> None:
    mount = clone_mount(source)
    try:
        attach_mount(mount, point)
        change_mount(mount, 0, shared=True)
    finally:
        os.close(mount)


def fill_slots(
    mounts: Sequence[Mount],
    layout: Layout,
    paths: SandboxPaths,
    record: Record,
    user: Identity,
    list_processes: Callable[[], Iterable[int]],
) -> Sequence[Bind]:
    """What the sandbox sees now: natively at its places, in gVisor on the tray. A slot is filled once.
    `list_processes`: all of the sandbox."""
    if not mounts or record.slots != tuple(mount.target for mount in mounts):
        raise EngineError("slots", f"the sandbox has slots for {', '.join(record.slots) or 'nothing'}")
    binds, sources = show_mounts(mounts, layout, paths, record.first_id, user)
    replace(record, sources=sources, slots=()).save(paths.record)
    if record.first_id is None:
        pin_mounts(mounts, paths, list_processes)
    points = [paths.slots / str(index) for index in range(len(mounts))]
    for index, point in enumerate(points):
        # Natively what is followed is the slot, in gVisor the tray.
        followed = os.open(paths.slots if record.first_id is None else point, _FOLDER)
        try:
            if record.first_id is None:
                point.mkdir(mode=0o755)
            _pass_on(paths.mounts / f"mount-{index}", point)
            if record.first_id is not None or point == points[-1]:
                change_mount(followed, RDONLY, recursive=True)  # private again: what happens here is seen by nobody
        finally:
            os.close(followed)
    for point in (*points, paths.slots):
        _unmount(point)
    # The directories stay: to remove one would take away what is mounted on it anywhere, in the sandbox too.
    seal_mounts(paths)
    return binds


def _pass_on(source: Path, point: Path) -> None:
    """All of it at once, to whoever follows."""
    tree = clone_mount(source, recursive=True)
    try:
        attach_mount(tree, point)
    finally:
        os.close(tree)


def _unmount(point: Path) -> None:
    while _libc.umount2(os.fsencode(point), _DETACH) == 0:
        pass  # a slot has two, one over the other
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise EngineError("slots", f"{point} cannot be unmounted: {os.strerror(ctypes.get_errno())}")


def list_bindings(binds: Sequence[Bind]) -> Iterator[tuple[bytes, bytes]]:
    """What the agent in gVisor is to mount where, in order. All of it is read-only until all of it is there."""
    places: list[str] = []
    for bind in binds:
        source = bind.target  # a kept part, or on the way to one
        if not any(bind.target.startswith(f"{place}/") for place in places):
            source = f"{TRAY}/{len(places)}"
            places.append(bind.target)
        yield os.fsencode(source), os.fsencode(bind.target)
