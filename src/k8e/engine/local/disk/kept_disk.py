"""The disk of a sandbox that is stopped: a file with an ext4 inside, and nothing mounted.

It has no journal, which nobody missed while a disk's life was its sandbox's. So after an end that nobody unmounted it
at (the machine lost its power) it is checked and repaired before it is mounted again. The kernel says which that was:
it takes the mark of being whole off the superblock when it mounts an image, and puts it back when it unmounts. All of
that is the machine's kernel's writing; what a sandbox has on its disk is files.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.disk.loop import mount_image
from k8e.engine.local.system.tool import finish_in_thread, try_tool

_STATE_AT = 1024 + 0x3A
_MAGIC = 0xEF53
_WHOLE = 1  # EXT4_VALID_FS, and not EXT4_ERROR_FS
_OPTIONS = "noinit_itable"
_REPAIRED = 2  # e2fsck: 0 nothing to do, 1 repaired, 2 repaired and to be mounted anew, which it is
_CHECK_DEADLINE = 600.0
_log = logging.getLogger("k8e.engine")


def is_whole(image: Path) -> bool:
    """Whether it was unmounted, and nothing was wrong with it then."""
    with image.open("rb") as file:
        content = os.pread(file.fileno(), 4, _STATE_AT - 2)
    if len(content) < 4:
        raise EngineError("disk", f"{image} is cut off")
    magic, state = struct.unpack("<HH", content)
    if magic != _MAGIC:
        raise EngineError("disk", f"{image} has no filesystem")
    return bool(state == _WHOLE)


async def mount_kept(image: Path, where: Path) -> None:
    try:
        whole = is_whole(image)
    except FileNotFoundError:
        raise EngineError("disk", f"{image} is not there") from None
    if not whole:
        await _repair(image)
    await finish_in_thread(_mount, image, where)


def _mount(image: Path, where: Path) -> None:
    where.mkdir(mode=0o711, exist_ok=True)
    mount_image(image, where, _OPTIONS)


async def _repair(image: Path) -> None:
    """What can be put right without a doubt first (-p). Else as well as it can be: the files that are left are worth
    more to whoever kept them than a disk that nobody may look at."""
    complaint = ""
    for answer in ("-p", "-y"):
        finished = await try_tool("e2fsck", answer, image, deadline=_CHECK_DEADLINE, capture=True)
        _log.warning("%s was not unmounted: e2fsck %s gives %d", image, answer, finished.status)
        if finished.status <= _REPAIRED:
            return
        complaint = finished.complaint[-1000:]
    raise EngineError("disk", f"{image} cannot be repaired: {complaint}")


def sync_kept(image: Path, record: Path) -> None:
    """What was kept is on the machine's own disk when this returns. The last one is the list of all sandboxes."""
    for path in (image, record, record.parent, record.parent.parent):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if path != record:
                raise
            continue  # it was damaged, and set aside
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
