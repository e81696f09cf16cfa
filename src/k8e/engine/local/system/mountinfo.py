"""Reads the mount table. Names are bytes: a disk labelled in Latin-1 must not keep sandboxes from being destroyed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    point: Path
    kind: str  # of filesystem


def parse_mounts(text: bytes) -> list[MountEntry]:
    found = []
    for line in text.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        if separator:
            point = _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), before.split(b" ")[4])
            found.append(MountEntry(Path(os.fsdecode(point)), os.fsdecode(after.split(b" ")[0])))
    return found


def read_mounts() -> list[MountEntry]:
    return parse_mounts(Path("/proc/self/mountinfo").read_bytes())
