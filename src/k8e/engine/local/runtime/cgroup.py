"""Control groups of sandboxes, v2 and v1 (also mixed): their processes, out-of-memory kills, and their removal.

The runtimes create them and set the limits from the bundle; this reads, empties and removes them, and allows bursts,
which not every runtime can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from k8e.engine import EngineError, Usage
from k8e.engine.local.system.calls import read_mounts

_DEADLINE = 30.0
_BUSY_PAUSE = 0.01  # nothing tells when a group stops being busy
_PAGE = 4096  # all that is needed of a file of the kernel's


def hierarchies() -> list[Path]:
    """Every mounted hierarchy; one in a pure v2 system."""
    return [mount.point for mount in read_mounts() if mount.kind in ("cgroup", "cgroup2")]


def _peek(path: str) -> bytes | None:
    """Reads the beginning of a file, None when there is none. Every command waits for it: this costs a quarter of what
    pathlib and file objects cost."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _PAGE)
    except OSError as error:
        if error.errno == errno.ENODEV:  # removed between the two calls
            return None
        raise
    finally:
        os.close(descriptor)


def _read_kills(content: bytes) -> int:
    for line in content.splitlines():
        key, _, value = line.partition(b" ")
        if key == b"oom_kill":
            return int(value)
    return 0


class Cgroups:
    """The groups below one name, one per sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._hierarchies = hierarchies()
        self._kills: tuple[Path, str] | None = None  # hierarchy and file

    def path_of(self, sandbox: str) -> str:
        """Returns the `cgroupsPath` of a bundle."""
        return f"/{self.name}/{sandbox}"

    def _directories(self, sandbox: str) -> Iterator[Path]:
        for hierarchy in self._hierarchies:
            directory = hierarchy / self.name / sandbox
            if directory.is_dir():
                yield directory

    def sandboxes(self) -> set[str]:
        names: set[str] = set()
        for hierarchy in self._hierarchies:
            with contextlib.suppress(FileNotFoundError):
                names.update(entry.name for entry in os.scandir(hierarchy / self.name) if entry.is_dir())
        return names

    def processes(self, sandbox: str) -> set[int]:
        pids: set[int] = set()
        for directory in self._directories(sandbox):
            for group, _, _ in os.walk(directory):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    pids.update(int(line) for line in Path(group, "cgroup.procs").read_text().split())
        return pids - {0}

    def alive(self, sandbox: str) -> bool:
        """Whether a process is left. Asked before every run, so one hierarchy has to do: all have the same ones."""
        for hierarchy in self._hierarchies:
            if (processes := _peek(f"{hierarchy}/{self.name}/{sandbox}/cgroup.procs")) is not None:
                return bool(processes)
        return False

    def oom_kills(self, sandbox: str) -> int:
        """Asked before and after every run, so where the number stands is looked for once."""
        if self._kills is None:
            self._kills = next(self._find_kills(sandbox), None)
        if self._kills is not None:
            hierarchy, file = self._kills
            return _read_kills(_peek(f"{hierarchy}/{self.name}/{sandbox}/{file}") or b"")
        return 0

    def _find_kills(self, sandbox: str) -> Iterator[tuple[Path, str]]:
        for hierarchy in self._hierarchies:
            for file in ("memory.events", "memory.oom_control"):
                if (hierarchy / self.name / sandbox / file).is_file():
                    yield hierarchy, file

    def allow_bursts(self, sandbox: str) -> None:
        """Lets the sandbox use in one period what it has not used of its quota in the one before: a program that starts
        does not wait for the next. No limit depends on it, so a kernel that cannot (before 5.14) does without."""
        for hierarchy in self._hierarchies:
            directory = f"{hierarchy}/{self.name}/{sandbox}"
            for quota, burst in (("cpu.cfs_quota_us", "cpu.cfs_burst_us"), ("cpu.max", "cpu.max.burst")):
                words = (_peek(f"{directory}/{quota}") or b"").split()
                if words and words[0].isdigit():
                    with contextlib.suppress(OSError):
                        Path(directory, burst).write_bytes(words[0])

    def measure(self, sandbox: str) -> Usage:
        """Of all processes of the sandbox, the runtime's own included: that is what the machine pays."""
        seconds, memory = 0.0, 0
        for hierarchy in self._hierarchies:
            top = f"{hierarchy}/{self.name}/{sandbox}"
            if (content := _peek(f"{top}/cpu.stat")) is not None and content.startswith(b"usage_usec "):
                seconds = int(content.split()[1]) / 1e6
            elif (content := _peek(f"{top}/cpuacct.usage")) is not None:
                seconds = int(content) / 1e9
            for file in ("memory.current", "memory.usage_in_bytes"):
                if (content := _peek(f"{top}/{file}")) is not None:
                    memory = int(content)
        return Usage(seconds, memory)

    def kill(self, sandbox: str, deadline: float = _DEADLINE) -> None:
        """Kills until no process is left. Blocks while they die: call it in a thread."""
        self._kill_until(sandbox, time.monotonic() + deadline)

    def _thaw(self, sandbox: str) -> None:
        """A frozen process does not die (v1), or stays frozen when its group is removed."""
        for directory in self._directories(sandbox):
            for file, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                with contextlib.suppress(OSError):  # only one of the hierarchies has it, and perhaps not this one
                    Path(directory, file).write_text(word)

    def _kill_until(self, sandbox: str, end: float) -> None:
        self._thaw(sandbox)
        while pids := self.processes(sandbox):
            if time.monotonic() > end:
                raise EngineError("processes", f"{len(pids)} of {sandbox} outlive SIGKILL, among them {min(pids)}")
            for pid in pids:
                try:
                    handle = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                try:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    select.select([handle], [], [], 1)
                finally:
                    os.close(handle)

    def remove(self, sandbox: str, deadline: float = _DEADLINE) -> None:
        """Removes the groups, and kills processes that join meanwhile: a runtime that was killed while it moved itself
        here still arrives. Blocks like `kill`."""
        end = time.monotonic() + deadline
        while not self._try_to_remove(sandbox):
            if time.monotonic() > end:
                raise EngineError("cgroup", f"that of {sandbox} is still in use after {deadline:g} s")
            self._kill_until(sandbox, end)
            time.sleep(_BUSY_PAUSE)

    def _try_to_remove(self, sandbox: str) -> bool:
        """False while a process is in one of them."""
        free = True
        for directory in list(self._directories(sandbox)):
            for group, _, _ in os.walk(directory, topdown=False):
                try:
                    os.rmdir(group)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    # ENOTEMPTY: a group below was made, or is still busy.
                    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                        raise EngineError("cgroup", f"{group} cannot be removed: {error.strerror}") from error
                    free = False
        return free

    def remove_all(self) -> None:
        """Removes the common parent, once it is empty."""
        for hierarchy in self._hierarchies:
            with contextlib.suppress(OSError):
                os.rmdir(hierarchy / self.name)
