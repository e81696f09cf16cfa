"""Watches the room that etcd has on its disk: without it no object can be written, and etcd ends and is started again
until there is room. What it has acknowledged is not lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

# etcd reserves 64 MiB for its next log file, and a snapshot for a new server is as large as its data.
NEEDED: Final = 256 << 20

log = logging.getLogger("k8e.cluster")


def measure_room(folder: Path) -> int:
    """Returns the bytes that a user without rights can still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class DiskWatch:
    def __init__(self, folder: Path, needed: int = NEEDED) -> None:
        self._folder = folder
        self._needed = needed
        self.is_low = False

    def look(self) -> None:
        """Says once that there is little room, and once that there is enough again."""
        room = measure_room(self._folder)
        if (room < self._needed) == self.is_low:
            return
        self.is_low = not self.is_low
        if self.is_low:
            log.error(
                "etcd_disk_full: the disk of %s has %d MiB left; etcd needs %d. Make room: nothing can be written "
                "without it, and what was written is kept",
                self._folder,
                room >> 20,
                self._needed >> 20,
            )
        else:
            log.info("the disk of %s has room again: %d MiB", self._folder, room >> 20)
