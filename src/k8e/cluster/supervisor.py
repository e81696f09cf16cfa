"""Runs the programs of a cluster: starts each, waits until it is ready, starts it again with a growing pause when it
ends or stays sick, and keeps what it says in one file for each, which does not grow without bound.

A supervisor that was killed leaves its programs running. The next one takes over those that are what it would start,
and ends the others: no program runs twice, and an upgrade restarts what has changed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.cluster.api import becomes_true
from k8e.cluster.child import Child, Program, find_children, start_child
from k8e.cluster.errors import StartFailed
from k8e.cluster.limits import Groups

__all__ = ["Program", "Supervisor", "Timing", "read_end"]

_LAST: Final = 1500  # bytes of a log that an error contains


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, but for `strikes` and `log_size`."""

    first_pause: float = 0.5  # before a program is started again
    longest_pause: float = 30.0
    steady: float = 60.0  # after so long a program has proved itself: the pause is the first one again
    interval: float = 10.0  # between two questions for its health
    strikes: int = 6  # answers in a row that it is not well, before it is ended
    grace: float = 10.0  # between SIGTERM and SIGKILL
    log_size: int = 16 << 20  # bytes, of each of two files


class Supervisor:
    def __init__(
        self, logs: Path, environment: Mapping[str, str], timing: Timing | None = None, groups: Groups | None = None
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._timing = timing or Timing()
        self._groups = groups
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Child] = {}
        self._left: list[Child] = []

    @property
    def pids(self) -> dict[str, int]:
        """Of programs that run, or whose end was not noticed yet."""
        return {name: child.pid for name, child in self._children.items() if child.is_alive}

    def find_left(self) -> None:
        """Finds programs that an earlier supervisor has left. Each is taken over by its `start`, or ended."""
        self._left = find_children(self._logs)

    async def end_left(self) -> None:
        """Ends programs that were left and that are not needed any more."""
        for child in self._left:
            self._note(child.name, f"process {child.pid} of an earlier supervisor is ended")
            await child.end(self._timing.grace)
        self._left = []

    async def start(self, program: Program) -> None:
        """Returns when the program is ready. A program that ends before that is an error: it would end again."""
        child = await self._take_over(program)
        if child is None:
            child = self._spawn(program)
            await self._wait_ready(program, child)
        self._keepers[program.name] = asyncio.create_task(self._keep(program, child))

    async def stop(self) -> None:
        """Ends the programs, the last one first: none loses what it depends on."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for child in reversed(list(self._children.values())):
            await child.end(self._timing.grace)

    async def _take_over(self, program: Program) -> Child | None:
        found = [child for child in self._left if child.name == program.name]
        self._left = [child for child in self._left if child.name != program.name]
        taken = None
        for child in found:
            if taken is None and child.fingerprint == program.fingerprint:
                taken = child
            else:
                self._note(program.name, f"process {child.pid} is not what it should be, and is ended")
                await child.end(self._timing.grace)
        if taken is None:
            return None
        self._children[program.name] = taken
        if not await becomes_true(program.ready, program.patience, lambda: not taken.is_alive):
            self._note(program.name, f"process {taken.pid} does not become ready, and is ended")
            await taken.end(self._timing.grace)
            return None
        self._limit(program, taken)
        self._note(program.name, f"process {taken.pid} is taken over")
        return taken

    def _spawn(self, program: Program) -> Child:
        log = self._logs / f"{program.name}.log"
        try:
            child = start_child(program, self._logs, self._environment, log)
        except OSError as error:
            raise self._failure(program, f"it cannot be executed: {error}") from error
        self._children[program.name] = child
        self._limit(program, child)
        return child

    def _limit(self, program: Program, child: Child) -> None:
        """A machine whose kernel has no such limits runs its programs without; its log says so."""
        if self._groups is not None and program.limits is not None:
            try:
                self._groups.limit(program.name, child.pid, program.limits)
            except OSError as error:
                self._note(program.name, f"runs without limits: {error}")

    async def _wait_ready(self, program: Program, child: Child) -> None:
        if not await becomes_true(program.ready, program.patience, lambda: not child.is_alive):
            late = f"it was not ready after {program.patience:.0f} s"
            raise self._failure(program, late if child.is_alive else f"it ended with {child.status}")

    async def _keep(self, program: Program, child: Child) -> None:
        timing, pause = self._timing, self._timing.first_pause
        while True:
            begin = time.monotonic()
            status = await self._watch(program, child)
            lived = time.monotonic() - begin
            pause = timing.first_pause if lived > timing.steady else pause
            how = "ended" if status is None else f"ended with {status}"
            self._note(program.name, f"{how} after {lived:.0f} s; started again in {pause:.1f} s")
            while True:
                await asyncio.sleep(pause)
                pause = min(pause * 2, timing.longest_pause)
                try:
                    child = self._spawn(program)
                    break
                except StartFailed as error:
                    self._note(program.name, f"{error}; tried again in {pause:.1f} s")

    async def _watch(self, program: Program, child: Child) -> int | None:
        """Returns the exit status of a program that has ended, by itself or because it was sick for too long."""
        strikes = 0
        while True:
            try:
                async with asyncio.timeout(self._timing.interval):
                    return await child.wait()
            except TimeoutError:
                await asyncio.to_thread(limit_log, self._logs / f"{program.name}.log", self._timing.log_size)
                well = program.health is None or await program.health()
                strikes = 0 if well else strikes + 1
            if strikes >= self._timing.strikes:
                self._note(program.name, f"was not well for {strikes} questions, and is ended")
                await child.end(self._timing.grace)

    def _note(self, name: str, text: str) -> None:
        with open(self._logs / "supervisor.log", "a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {name} {text}\n")

    def _failure(self, program: Program, reason: str) -> StartFailed:
        return StartFailed(
            "component_not_ready",
            f"{program.name} does not start: {reason}",
            detail=read_end(self._logs / f"{program.name}.log", _LAST),
            hint=f"the last lines of its log are the detail; the program is {program.argv[0]}",
        )


def limit_log(path: Path, size: int) -> None:
    """Moves the content of a long log to a second file. The program goes on with the same one, which it has open."""
    try:
        if path.stat().st_size <= size:
            return
        with open(path, "r+b") as current, open(path.with_suffix(".log.1"), "wb") as old:
            os.fchmod(old.fileno(), 0o600)
            end = os.fstat(current.fileno()).st_size
            os.sendfile(old.fileno(), current.fileno(), max(0, end - size), size)
            current.truncate(0)
    except FileNotFoundError:
        pass


def read_end(path: Path, size: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
