"""The process of a program: started here, or found, because an earlier supervisor has started it and was killed.

A process is known by three variables of its environment, which the kernel keeps for it: no file has to be written
between its start and its first instruction, and none can be out of date.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from k8e.cluster.api import Question
from k8e.cluster.limits import Limits

_OWNER: Final = "K8E_SUPERVISOR"  # the supervisor's folder
_NAME: Final = "K8E_PROGRAM"
_FINGERPRINT: Final = "K8E_PROGRAM_FINGERPRINT"


async def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    argv: Sequence[str]
    ready: Question = _at_once
    patience: float = 60.0
    health: Question | None = None  # asked as long as it runs
    user: int = 0  # and its group
    reads: tuple[Path, ...] = ()  # files that it reads only at its start
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits | None = None  # no part of the fingerprint: they can be changed while it runs

    @property
    def fingerprint(self) -> str:
        """Tells whether a process that runs is what would be started now."""
        total = hashlib.sha256(repr((tuple(self.argv), self.user, sorted(self.environment.items()))).encode())
        for path in self.reads:
            total.update(path.read_bytes())
        return total.hexdigest()


class Child:
    """One process. Its end is noticed by its descriptor, whether it is a child of this process or not."""

    def __init__(
        self, name: str, fingerprint: str, pid: int, descriptor: int, own: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.pid = pid
        self._descriptor = descriptor
        self._own = own
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._notice_end)

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs, and for one that another process has started."""
        return None if self._own is None else self._own.returncode

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.status

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    async def end(self, patience: float) -> None:
        """Ends it; after `patience` it is killed."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()

    def _notice_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._own is not None:
            self._own.wait()  # it has ended already
        self._ended.set()


def start_child(program: Program, owner: Path, environment: Mapping[str, str], log: Path) -> Child:
    """Starts a process, in a session of its own: signals for the terminal of this one do not reach it."""
    fingerprint = program.fingerprint
    marks = {_OWNER: str(owner), _NAME: program.name, _FINGERPRINT: fingerprint}
    user = program.user or None
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        process = subprocess.Popen(
            program.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, **program.environment, **marks},
            start_new_session=True,
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            umask=0o022,
        )
    finally:
        os.close(output)
    # No other part of this process collects it, so the number is still its own.
    return Child(program.name, fingerprint, process.pid, os.pidfd_open(process.pid), process)


def find_children(owner: Path) -> list[Child]:
    """Returns the processes of programs that an earlier supervisor with this folder has started."""
    found = []
    for pid, marks in list_marked(owner):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            if _read_marks(pid) == marks:  # still the same process
                found.append(Child(marks[_NAME], marks[_FINGERPRINT], pid, descriptor))
            else:
                os.close(descriptor)
    return found


def list_programs(owner: Path) -> dict[str, int]:
    """Returns the pids of programs that run, by name."""
    return {marks[_NAME]: pid for pid, marks in list_marked(owner)}


def list_marked(owner: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the processes with the marks. Their own children have the same environment, but lead no session."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        marks = _read_marks(pid)
        if marks.get(_OWNER) == str(owner) and _NAME in marks and _FINGERPRINT in marks:
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == pid:
                    yield pid, marks


def _read_marks(pid: int) -> dict[str, str]:
    """Empty for a process that has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        pairs = (pair.partition("=") for pair in text.split("\0"))
        return {name: value for name, _, value in pairs if name in (_OWNER, _NAME, _FINGERPRINT)}
    return {}
