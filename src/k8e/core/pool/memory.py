"""How much of the machine's memory is free, which bounds the number of warm sandboxes.

Of the machine, or of the control group that the daemon sees as its root or is in (a container's limit), whichever has
less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class Memory(Protocol):
    def free_share(self) -> float:
        """Between 0 and 1, of what could be used at all."""


class SystemMemory:
    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups

    def free_share(self) -> float:
        return min([self._machine_share(), *self._group_shares()])

    def total(self) -> int:
        """Bytes that could be used at all."""
        limits = [self._sizes()["MemTotal"] << 10]
        for folder in self._groups():
            for limit, _ in _GROUP_FILES:
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((folder / limit).read_text()))
        return min(limits)

    def _sizes(self) -> dict[str, int]:
        """KiB"""
        sizes: dict[str, int] = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(value.split()[0])
        return sizes

    def _machine_share(self) -> float:
        sizes = self._sizes()
        return sizes["MemAvailable"] / sizes["MemTotal"]

    def _group_shares(self) -> Iterator[float]:
        for folder in self._groups():
            for limit, used in _GROUP_FILES:
                # "max" is no number, and a group without a memory controller has no such files.
                with contextlib.suppress(OSError, ValueError):
                    most = int((folder / limit).read_text())
                    held = int((folder / used).read_text()) - _reclaimable(folder)
                    yield max(0.0, 1 - held / most) if most > 0 else 0.0

    def _groups(self) -> Iterator[Path]:
        """Version 2, version 1 and both mixed; the root of what we see, and where we are."""
        for line in ("0::/", "0:memory:/", *(self._proc / "self/cgroup").read_text().splitlines()):
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield self._cgroups / path.lstrip("/")
                yield self._cgroups / "unified" / path.lstrip("/")
            elif "memory" in controllers.split(","):
                yield self._cgroups / "memory" / path.lstrip("/")


def _reclaimable(folder: Path) -> int:
    """The page cache that no process uses: it counts as used, and the kernel gives it back when memory is short."""
    sizes = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", "0")))
