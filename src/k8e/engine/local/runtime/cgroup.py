"""Control groups of sandboxes, v2 and v1 (also mixed): their processes, out-of-memory kills, and their removal.

The runtimes create them and set the limits from the bundle; this reads, empties and removes them, and allows bursts,
which not every runtime can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
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
_OPEN_FILES = 256
_KILLS = ("memory.events", "memory.oom_control")
_BURSTS = (("cpu.cfs_quota_us", "cpu.cfs_burst_us"), ("cpu.max", "cpu.max.burst"))
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_THAWS = (("freezer.state", b"THAWED"), ("cgroup.freeze", b"0"))


def hierarchies() -> list[Path]:
    """Every mounted hierarchy; one in a pure v2 system."""
    return [mount.point for mount in read_mounts() if mount.kind in ("cgroup", "cgroup2")]


def _peek(path: str) -> bytes | None:
    """Reads the beginning of a file, None when there is none. This costs a quarter of what pathlib and file objects
    cost."""
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


class _OpenFiles:
    """Files of groups that every command reads, kept open: to open one takes six times as long as to read it. Those
    that were used last; a sandbox has two. For the event loop's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._descriptors: dict[str, int] = {}  # by path, the one used last at the end

    def peek(self, path: str) -> bytes | None:
        """As `_peek`. Of a group that was removed and made again under its name the file is opened anew."""
        descriptor = self._descriptors.pop(path, -1)
        if descriptor >= 0:
            try:
                content = os.pread(descriptor, _PAGE, 0)
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.ENODEV:
                    raise
            else:
                self._descriptors[path] = descriptor
                return content
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            content = os.pread(descriptor, _PAGE, 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.ENODEV:  # removed between the two calls
                return None
            raise
        self._descriptors[path] = descriptor
        if len(self._descriptors) > self._most:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        return content

    def close(self, path: str) -> None:
        """Fine where it is not open."""
        if (descriptor := self._descriptors.pop(path, None)) is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        for path in list(self._descriptors):
            self.close(path)


def _read_kills(content: bytes) -> int:
    found = _OOM_KILLS.search(content)
    return int(found[1]) if found else 0


def _walk(directory: str) -> list[str]:
    """Lists a group and those below it, the innermost first. A group that has none is told by its count of links: to
    list one takes longer than all else that is done with it."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        if os.stat(directory).st_nlink > 2:
            for entry in os.scandir(directory):
                if entry.is_dir(follow_symlinks=False):
                    found += _walk(entry.path)
    return [*found, directory]


def _read_pids(group: str) -> set[int]:
    try:
        with open(f"{group}/cgroup.procs", "rb") as file:
            return set(map(int, file.read().split()))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ESRCH):  # it went meanwhile
            raise
        return set()


def _kill_all(pids: set[int]) -> None:
    """All of them at once, and then waits a second for each to die."""
    with contextlib.ExitStack() as handles:
        dying = select.poll()
        left = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                handles.callback(os.close, handle)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                dying.register(handle, select.POLLIN)
                left += 1
        while left and (ended := dying.poll(1000)):
            for handle, _ in ended:
                dying.unregister(handle)
            left -= len(ended)


class Cgroups:
    """The groups below one name, one per sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = hierarchies()
        self._unified = {os.fspath(top) for top in found if (top / "cgroup.controllers").exists()}  # version 2
        self._hierarchies = sorted(map(os.fspath, found), key=lambda top: top not in self._unified)
        self._homes: dict[str, str] = {}  # the hierarchy in which a sandbox was found; not every runtime uses all
        self._kills: tuple[str, str] | None = None  # hierarchy and file
        # Files that a group of a hierarchy has: every group has the same ones, so they are looked for once.
        self._having: dict[tuple[str, str], bool] = {}
        self._open_files = _OpenFiles(_OPEN_FILES)

    def path_of(self, sandbox: str) -> str:
        """Returns the `cgroupsPath` of a bundle."""
        return f"/{self.name}/{sandbox}"

    def _directories(self, sandbox: str) -> list[tuple[str, str]]:
        """Lists its groups, each with its hierarchy."""
        places = ((hierarchy, f"{hierarchy}/{self.name}/{sandbox}") for hierarchy in self._hierarchies)
        return [(hierarchy, directory) for hierarchy, directory in places if os.path.isdir(directory)]

    def _has(self, hierarchy: str, directory: str, file: str) -> bool:
        known = self._having.get((hierarchy, file))
        if known is None:
            known = os.path.exists(f"{directory}/{file}")
            if known or os.path.exists(f"{directory}/cgroup.procs"):  # else the group has just gone
                self._having[hierarchy, file] = known
        return known

    def sandboxes(self) -> set[str]:
        names: set[str] = set()
        for hierarchy in self._hierarchies:
            with contextlib.suppress(FileNotFoundError):
                names.update(entry.name for entry in os.scandir(f"{hierarchy}/{self.name}") if entry.is_dir())
        return names

    def processes(self, sandbox: str) -> set[int]:
        pids: set[int] = set()
        for _, directory in self._directories(sandbox):
            for group in _walk(directory):
                pids |= _read_pids(group)
        return pids - {0}

    def alive(self, sandbox: str) -> bool:
        """Whether a process is left. Asked before every run, so one hierarchy has to do: all have the same ones. In the
        event loop's thread, as the next one."""
        known = self._homes.get(sandbox)
        for hierarchy in (known, *self._hierarchies) if known else self._hierarchies:
            path = f"{hierarchy}/{self.name}/{sandbox}/cgroup.procs"
            # Kept open in version 2 only: version 1 tells a reader for a second what it told it before.
            processes = self._open_files.peek(path) if hierarchy in self._unified else _peek(path)
            if processes is not None:
                self._homes[sandbox] = hierarchy
                return bool(processes)
        return False

    def oom_kills(self, sandbox: str) -> int:
        """Asked before and after every run, so where the number stands is looked for once."""
        if self._kills is None:
            self._kills = next(self._find_kills(sandbox), None)
        if self._kills is not None:
            hierarchy, file = self._kills
            return _read_kills(self._open_files.peek(f"{hierarchy}/{self.name}/{sandbox}/{file}") or b"")
        return 0

    def let_go(self, sandbox: str) -> None:
        """Closes what is open of a sandbox that is gone."""
        self._homes.pop(sandbox, None)
        for hierarchy in self._hierarchies:
            for file in ("cgroup.procs", *_KILLS):
                self._open_files.close(f"{hierarchy}/{self.name}/{sandbox}/{file}")

    def close(self) -> None:
        self._open_files.close_all()

    def _find_kills(self, sandbox: str) -> Iterator[tuple[str, str]]:
        for hierarchy in self._hierarchies:
            for file in _KILLS:
                if os.path.isfile(f"{hierarchy}/{self.name}/{sandbox}/{file}"):
                    yield hierarchy, file

    def allow_bursts(self, sandbox: str) -> None:
        """Lets the sandbox use in one period what it has not used of its quota in the one before: a program that starts
        does not wait for the next. No limit depends on it, so a kernel that cannot (before 5.14) does without."""
        for hierarchy, directory in self._directories(sandbox):
            for quota, burst in _BURSTS:
                if self._has(hierarchy, directory, burst):
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
        for hierarchy, directory in self._directories(sandbox):
            for file, word in _THAWS:
                if self._has(hierarchy, directory, file):
                    with contextlib.suppress(OSError):
                        Path(directory, file).write_bytes(word)

    def _kill_until(self, sandbox: str, end: float) -> None:
        self._thaw(sandbox)
        while pids := self.processes(sandbox):
            if time.monotonic() > end:
                raise EngineError("processes", f"{len(pids)} of {sandbox} outlive SIGKILL, among them {min(pids)}")
            _kill_all(pids)

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
        for _, directory in self._directories(sandbox):
            for group in _walk(directory):
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
                os.rmdir(f"{hierarchy}/{self.name}")
