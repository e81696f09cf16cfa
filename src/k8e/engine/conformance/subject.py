"""The engine that checks are run against with what its harness can do, the list of checks, and what they share."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k8e.engine import Engine, EngineError, Observation, Place, SandboxSpec
from k8e.link.model import ExecSpec, Sandbox

PATIENCE = 20.0  # for what a kernel does in its own time
GONE = Observation(alive=False, oom_kills=0)


async def remove_directory(kept: str) -> None:
    holds("its files are kept", await asyncio.to_thread(Path(kept).is_dir))
    await asyncio.to_thread(shutil.rmtree, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    engine: Engine
    spec: SandboxSpec  # of a runtime that works here
    again: Callable[[], Engine]  # the engine of the next daemon: another one, on the same state
    in_force: Callable[[str, str], Awaitable[bool]]  # whether a sandbox may reach an address, by the machine's rules
    have_refused: Callable[[str], Awaitable[None]]  # has the sandbox ask for something that it may not reach
    kill: Callable[[str], Awaitable[None]] | None = None  # "kill": SIGKILL to all that a sandbox has on the host
    directory: Path | None = None  # "mounts": one of the machine that sandboxes can be shown
    starve: Callable[[str], Awaitable[None]] | None = None  # "oom": the kernel kills a process there for want of memory
    # "crash": another daemon creates, stops, starts or destroys a sandbox, and is killed after so many seconds if it is
    # not done by then. Returns how long it took.
    crash: Callable[[str, str, float], Awaitable[float]] | None = None
    run_kind: str = "tmpfs"  # what `stat` calls the file system of /run
    agent_apart: bool = True  # "apart": the agent is another user than the default one
    discard: Callable[[str], Awaitable[None]] = (
        remove_directory  # what `set_aside` kept; AssertionError: it is not there
    )
    names: set[str] = field(default_factory=set)  # of all that checks made
    durations: dict[str, float] = field(default_factory=dict)  # of what `crash` does, in seconds

    @property
    def provides(self) -> frozenset[str]:
        offers = {"kill": self.kill, "mounts": self.directory, "oom": self.starve, "crash": self.crash}
        offered = {name for name, offer in offers.items() if offer is not None}
        return frozenset(offered | ({"apart"} if self.agent_apart else set()))

    def new_name(self) -> str:
        name = f"c{secrets.token_hex(4)}"
        self.names.add(name)
        return name

    @contextlib.asynccontextmanager
    async def made(self, **changes: Any) -> AsyncIterator[str]:
        """A sandbox of its own."""
        name = self.new_name()
        await self.engine.create(name, replace(self.spec, **changes))
        try:
            yield name
        finally:
            await self.engine.destroy(name)

    async def run(self, name: str, script: str, engine: Engine | None = None) -> str:
        """Output of a shell command of the default user that must work."""
        sandbox, place = await (engine or self.engine).attach(name)
        done = await run_script(sandbox, place, script)
        equal(f"exit code of {script!r}", (done[0], done[2]), (0, b""))
        return done[1].decode()


CheckFunction = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: CheckFunction
    needs: frozenset[str]  # of what `Subject.provides` may offer
    deadline: float = 120.0  # far more than it takes, so that a hang is a failure with a name


CHECKS: list[Check] = []


def check(needs: str = "") -> Callable[[CheckFunction], CheckFunction]:
    def register(function: CheckFunction) -> CheckFunction:
        name = getattr(function, "__name__", "").removeprefix("check_")
        if any(known.name == name for known in CHECKS):
            raise ValueError(f"two checks called {name}")
        CHECKS.append(Check(name, function, frozenset(needs.split())))
        return function

    return register


async def run_check(chosen: Check, subject: Subject) -> None:
    before = set(await subject.engine.list())
    try:
        async with asyncio.timeout(chosen.deadline):
            await chosen.run(subject)
    except TimeoutError as exc:
        raise AssertionError(f"{chosen.name} did not finish within {chosen.deadline:.0f} s") from exc
    equal("sandboxes afterwards", set(await subject.engine.list()), before)


async def run_script(sandbox: Sandbox, place: Place, script: str) -> tuple[int | None, bytes, bytes]:
    process = await sandbox.start(
        ExecSpec((b"sh", b"-c", script.encode()), place.env, place.workdir, place.user, stdin=False)
    )
    outputs = []
    for reader in (process.stdout, process.stderr):
        content = b""
        while chunk := await reader.read():
            content += chunk
        outputs.append(content)
    return (await process.wait()).exit_code, outputs[0], outputs[1]


def equal(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {got!r}")


def holds(what: str, condition: bool) -> None:
    if not condition:
        raise AssertionError(what)


async def fails(what: str, attempt: Awaitable[object]) -> EngineError:
    """With an EngineError, and with nothing else."""
    try:
        result = await attempt
    except EngineError as error:
        holds(f"{what}: says what could not be applied and why", bool(error.control and error.cause))
        return error
    raise AssertionError(f"{what}: expected an EngineError, got {result!r}")


async def comes_true(what: str, question: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + PATIENCE
    while not await question():
        holds(f"never came true: {what}", time.monotonic() < end)
        await asyncio.sleep(0.01)
