"""Measures what a sandbox takes of its node, from inside: Kubernetes tells it only where a metrics server is
installed, and only every quarter of a minute. It is shown to people; no decision rests on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from k8e.engine import Usage
from k8e.link.errors import AgentError
from k8e.link.model import Sandbox

_TICKS: Final = 100  # of a second: Linux shows times in these, whatever its own are
_PAGE: Final = 4096
_LONGEST: Final = 4096
_MOST: Final = 4096  # processes
# The files for memory and processor time, the key of the latter, and its parts of a second.
_CGROUPS: Final = (
    (b"/sys/fs/cgroup/memory.current", b"/sys/fs/cgroup/cpu.stat", b"usage_usec", 1_000_000),
    (b"/sys/fs/cgroup/memory/memory.usage_in_bytes", b"/sys/fs/cgroup/cpuacct/cpuacct.usage", b"", 1_000_000_000),
)


async def measure(sandbox: Sandbox) -> Usage:
    return await _ask_cgroup(sandbox) or await _ask_processes(sandbox)


async def _ask_cgroup(sandbox: Sandbox) -> Usage | None:
    """Where the runtime shows a container its own control group, in one of its two versions. gVisor shows none."""
    for memory, processor, name, unit in _CGROUPS:
        try:
            texts = [await sandbox.read_file(path, limit=_LONGEST) for path in (memory, processor)]
        except AgentError:
            continue
        values = [find_number(text, key) for text, key in zip(texts, (b"", name), strict=True)]
        if None not in values:
            return Usage((values[1] or 0) / unit, values[0] or 0)
    return None


def find_number(text: bytes, key: bytes) -> int | None:
    """The number behind a key, or, without a key, the whole text's."""
    for line in text.splitlines():
        words = line.split()
        if words[:-1] == ([key] if key else []) and words[-1:] and words[-1].isdigit():
            return int(words[-1][:18])
    return None


async def _ask_processes(sandbox: Sandbox) -> Usage:
    entries = await sandbox.list_dir(b"/proc")
    lines = []
    for entry in [each for each in entries if each.name.isdigit()][:_MOST]:
        try:
            lines.append(await sandbox.read_file(b"/proc/" + entry.name + b"/stat", limit=_LONGEST))
        except AgentError:
            continue  # it has ended
    return add_up(lines)


def add_up(lines: Iterable[bytes]) -> Usage:
    """From the lines of /proc/PID/stat: times with those of children that were waited for, and resident pages. A line
    that cannot be read counts nothing: a sandbox may say anything."""
    ticks, pages = 0, 0
    for line in lines:
        fields = line.rpartition(b")")[2].split()
        if len(fields) > 21 and all(field.isdigit() for field in (*fields[11:15], fields[21])):
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
    return Usage(ticks / _TICKS, pages * _PAGE)
