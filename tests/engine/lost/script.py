"""Attempts as lists of system calls, written down for probe.c and read from what it says."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

SOURCE = Path(__file__).with_name("probe.c")

# Of x86_64.
CALLS = {
    "write": 1, "ioctl": 16, "pwrite64": 18, "socket": 41, "connect": 42, "execve": 59, "ftruncate": 77, "fchmod": 91,
    "setresuid": 117, "pivot_root": 155, "chroot": 161, "fallocate": 285, "prlimit64": 302,
    "mount": 165, "umount2": 166, "init_module": 175, "fsetxattr": 190, "add_key": 248, "openat": 257, "mkdirat": 258,
    "mknodat": 259, "fchownat": 260, "unlinkat": 263, "linkat": 265, "symlinkat": 266, "fchmodat": 268, "unshare": 272,
    "utimensat": 280, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "renameat2": 316, "bpf": 321,
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "openat2": 437, "mount_setattr": 442, "fchmodat2": 452,
}  # fmt: skip


class Zeros:
    """A buffer for the kernel to write to."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of an earlier call of the same attempt."""

    index: int


Argument = int | str | Zeros | Result


@dataclass(slots=True)
class Attempt:
    """The last call is the one that must be refused; those before it lead there, and must work."""

    name: str
    calls: list[str] = field(default_factory=list)

    def call(self, name: str, *arguments: Argument) -> Result:
        self.calls.append(" ".join([str(CALLS[name]), *(_write(argument) for argument in arguments)]))
        return Result(len(self.calls) - 1)


def _write(argument: Argument) -> str:
    match argument:
        case str():
            return "s:" + quote(argument, safe="/.-_")
        case Result(index):
            return f"r{index}"
        case int():
            return str(argument)
        case _:
            return "z"


@dataclass(frozen=True, slots=True)
class Outcome:
    results: tuple[int, ...]
    killed: int | None

    def describe(self) -> str:
        words = [str(value) if value >= 0 else errno.errorcode.get(-value, str(value)) for value in self.results]
        return " ".join([*words, *([f"killed by {self.killed}"] if self.killed else [])])


def write_script(attempts: Sequence[Attempt]) -> str:
    return "".join("".join(f"{call};" for call in attempt.calls) + "\n" for attempt in attempts)


def read_outcomes(text: str) -> list[Outcome]:
    outcomes = []
    for line in text.splitlines():
        results, _, killed = line.partition("killed ")
        outcomes.append(Outcome(tuple(map(int, results.split())), int(killed) if killed else None))
    return outcomes


def build_probe(target: Path) -> None:
    subprocess.run(["gcc", "-static", "-Os", "-Wall", "-Wextra", "-Werror", "-o", target, SOURCE], check=True)
