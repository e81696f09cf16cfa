"""Limits of memory and tasks for the programs of a cluster: a control group for each, in both kinds of hierarchies.

    /sys/fs/cgroup/GROUP/PROGRAM               v2
    /sys/fs/cgroup/memory/GROUP/PROGRAM        v1, and the same for pids

A program that needs more memory than its limit is ended by the kernel, and started again by the supervisor: it takes
neither its neighbours nor pods with it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = ("memory", "pids")
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    memory: int  # bytes
    tasks: int = 4096  # processes and threads


class Groups:
    """The groups below one name."""

    def __init__(self, name: str, root: Path = _ROOT) -> None:
        self._name = name
        self._root = root
        self._unified = (root / "cgroup.controllers").exists()

    def limit(self, program: str, pid: int, limits: Limits) -> None:
        """Puts a process with all its threads into its group, whose limits are set before. OSError when the kernel
        does not do it; a process that has ended already is none."""
        for folder, values in self._describe(program, limits).items():
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in values.items():
                (folder / name).write_text(f"{value}\n")
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(f"{pid}\n")

    def remove(self) -> None:
        """Removes groups that are empty; a process that still runs keeps its own."""
        for top in self._list_tops():
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _describe(self, program: str, limits: Limits) -> dict[Path, dict[str, int]]:
        if self._unified:
            top = self._root / self._name
            top.mkdir(exist_ok=True)
            for parent in (self._root, top):
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in _CONTROLLERS))
            return {top / program: {"memory.max": limits.memory, "pids.max": limits.tasks}}
        return {
            self._root / "memory" / self._name / program: {"memory.limit_in_bytes": limits.memory},
            self._root / "pids" / self._name / program: {"pids.max": limits.tasks},
        }

    def _list_tops(self) -> list[Path]:
        if self._unified:
            return [self._root / self._name]
        return [self._root / controller / self._name for controller in _CONTROLLERS]
