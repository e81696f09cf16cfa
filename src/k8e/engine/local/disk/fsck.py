"""Checks the disk of a stopped sandbox before it is mounted again.

The filesystem has no journal: a journal would be lost work on a disk that lives no longer than its sandbox. So a disk
that was not unmounted (the machine lost its power) is checked and repaired first. The kernel tells: it clears the flag
for a clean filesystem in the superblock when it mounts an image, and sets it when it unmounts. All of that is written
by the machine's kernel; what a sandbox has on its disk is files.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.disk.disk import mount_image
from k8e.engine.local.system.calls import opened
from k8e.engine.local.system.tool import try_tool
from k8e.engine.tasks import finish_in_thread

_STATE_AT = 1024 + 0x3A
_MAGIC = 0xEF53
_CLEAN = 1  # EXT4_VALID_FS, and not EXT4_ERROR_FS
_REPAIRED = 2  # e2fsck: 0 nothing to do, 1 repaired, 2 repaired and to be mounted anew, which it is
_DEADLINE = 600.0
_log = logging.getLogger("k8e.engine")


def is_clean(image: Path) -> bool:
    """Whether it was unmounted, and nothing was wrong with it then."""
    with opened(image, os.O_RDONLY) as file:
        content = os.pread(file, 4, _STATE_AT - 2)
    if len(content) < 4:
        raise EngineError("disk", f"{image} is cut off")
    magic, state = struct.unpack("<HH", content)
    if magic != _MAGIC:
        raise EngineError("disk", f"{image} has no filesystem")
    return bool(state == _CLEAN)


async def mount_checked(image: Path, where: Path) -> None:
    try:
        clean = is_clean(image)
    except FileNotFoundError:
        raise EngineError("disk", f"{image} is not there") from None
    if not clean:
        await _repair(image)
    await finish_in_thread(_mount, image, where)


def _mount(image: Path, where: Path) -> None:
    where.mkdir(mode=0o711, exist_ok=True)
    mount_image(image, where)


async def _repair(image: Path) -> None:
    """Makes the repairs that are safe first (-p), and all others if that is not enough (-y): the files that are left
    are worth more to their owner than a disk that cannot be mounted."""
    complaint = ""
    for answer in ("-p", "-y"):
        finished = await try_tool("e2fsck", answer, image, deadline=_DEADLINE, capture=True)
        _log.warning("%s was not unmounted: e2fsck %s gives %d", image, answer, finished.status)
        if finished.status <= _REPAIRED:
            return
        complaint = finished.complaint[-1000:]
    raise EngineError("disk", f"{image} cannot be repaired: {complaint}")


def sync_disk(image: Path, record: Path) -> None:
    """Returns when the image and the record are on the machine's own disk, with the directories that name them."""
    for path in (image, record, record.parent, record.parent.parent):
        try:
            with opened(path, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)
        except FileNotFoundError:
            if path != record:  # which may have been damaged, and set aside
                raise
