"""An engine of a test module's own, in directories of its own, and the few ways in which tests use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, Unpack

from k8e.engine import Limits, Place, Runtime, RuntimeReport, SandboxSpec, Shape
from k8e.engine.local import LocalEngine
from k8e.engine.local.layout import SandboxPaths
from k8e.link import AgentLink
from k8e.link.model import AGENT, Completed, ExecOptions, ExecSpec, Identity
from tests.engine.answers import plant_answers
from tests.engine.traces import cgroup_parents, list_table, mount_points, wait_for_no_traces

T = TypeVar("T")

ROOT = Identity(0, 0)  # of the sandbox, as any command may be
LIMITS = Limits(cpus=2.0, memory=512 << 20, pids=256, disk=128 << 20, inodes=16_384, open_files=1024)


def read_host(path: str | Path) -> str:
    """A file of this machine, such as /proc has them."""
    return Path(path).read_text()


@contextlib.contextmanager
def place_for_engine() -> Iterator[tuple[Path, Path]]:
    """A state and a run directory: short, because sockets' paths are, and open to walk through, because the root of a
    user namespace is an unknown user out here."""
    top = Path(tempfile.mkdtemp(prefix="k8e-", dir="/tmp"))
    top.chmod(0o711)
    try:
        yield top / "s", top / "r"
    finally:
        left = [point for point in mount_points() if point.startswith(f"{top}/")]
        assert not left, f"not removing {top}: {left} are mounted there"
        shutil.rmtree(top)


@dataclass(frozen=True, slots=True)
class Room:
    """One sandbox and the way into it."""

    name: str
    link: AgentLink
    place: Place
    paths: SandboxPaths

    def spec(self, *argv: str | bytes, **options: Unpack[ExecOptions]) -> ExecSpec:
        """A command of the default user where commands start, unless told otherwise."""
        words = tuple(map(os.fsencode, argv))
        place = self.place
        usual = ExecSpec(words, place.env, place.workdir, place.user, stdin=False, keep_capabilities=place.capable)
        return replace(usual, **options)

    async def run(self, *argv: str | bytes, **options: Unpack[ExecOptions]) -> Completed:
        return await self.link.run(self.spec(*argv, **options))

    async def python(self, code: str, *argv: str, **options: Unpack[ExecOptions]) -> Completed:
        return await self.run("/usr/bin/python3", "-S", "-E", "-c", code, *argv, **options)

    async def output(self, *argv: str | bytes, **options: Unpack[ExecOptions]) -> str:
        """Of a command that must work."""
        done = await self.run(*argv, **options)
        assert done.outcome.exit_code == 0, done
        return done.stdout.decode()

    async def as_agent(self, *argv: str | bytes) -> Completed:
        """Runs with all that the agent itself has: the strongest that a process inside could ever become."""
        return await self.run(*argv, identity=AGENT, keep_capabilities=True)


@dataclass(slots=True)
class Rig:
    """A runtime, and an engine that makes sandboxes with it."""

    runtime: Runtime
    engine: LocalEngine
    report: RuntimeReport
    names: set[str] = field(default_factory=set)

    @property
    def native(self) -> bool:
        return self.runtime is Runtime.NATIVE

    def new_name(self) -> str:
        name = f"t{secrets.token_hex(4)}"
        self.names.add(name)
        return name

    def spec(self, limits: Limits = LIMITS) -> SandboxSpec:
        return SandboxSpec(self.runtime, limits=limits)

    def spec_of(self, image: str, limits: Limits = LIMITS) -> SandboxSpec:
        return SandboxSpec(self.runtime, image, limits)

    async def enter(self, name: str) -> Room:
        link, place = await self.engine.attach(name)
        assert isinstance(link, AgentLink)
        return Room(name, link, place, self.engine.layout.sandbox(name))

    async def shaped(self, shape: Shape, *, late: bool = False, image: str = "host") -> Room:
        """`late`: made before its mounts were known, and given them after that."""
        name = self.new_name()
        await self.engine.create(name, replace(self.spec_of(image), shape=shape.unbound if late else shape))
        if late:
            await self.engine.bind(name, shape.mounts)
        return await self.enter(name)

    @contextlib.asynccontextmanager
    async def room(self, limits: Limits = LIMITS, image: str = "host") -> AsyncIterator[Room]:
        name = self.new_name()
        await self.engine.create(name, self.spec_of(image, limits))
        try:
            yield await self.enter(name)
        finally:
            await self.engine.destroy(name)

    async def unless_dead(self, name: str, attempt: Coroutine[None, None, T]) -> T | None:
        """Returns what comes of the attempt, or None as soon as the sandbox is found dead."""
        task = asyncio.create_task(attempt)
        while not task.done():
            await asyncio.wait({task}, timeout=0.1)
            if not task.done() and not (await self.engine.observe(name)).alive:
                task.cancel()
                await asyncio.wait({task})
                return None
        return task.result()

    def cgroups(self, name: str) -> list[Path]:
        return [group / name for group in cgroup_parents(self.engine.layout) if (group / name).is_dir()]

    def host_processes(self, name: str) -> set[int]:
        pids: set[int] = set()
        for group in self.cgroups(name):
            with contextlib.suppress(FileNotFoundError):
                pids |= {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        return pids


@contextlib.asynccontextmanager
async def open_engine(state: Path, run: Path) -> AsyncIterator[LocalEngine]:
    """Whatever happens inside, all of its sandboxes are gone afterwards."""
    engine = LocalEngine(state, run)
    try:
        yield engine
    finally:
        for name in await engine.list():
            await engine.destroy(name)
        await engine.close()
        for group in cgroup_parents(engine.layout):
            with contextlib.suppress(OSError):  # not empty: the check for traces says so better
                os.rmdir(group)


async def find_report(engine: LocalEngine, runtime: Runtime) -> RuntimeReport:
    """Of that runtime only: to find out, a sandbox is made."""
    return await engine._probes.report(runtime)


@contextlib.asynccontextmanager
async def open_rig(runtime: Runtime) -> AsyncIterator[Rig]:
    with place_for_engine() as (state, run):
        plant_answers(state)
        rig: Rig | None = None
        async with open_engine(state, run) as engine:
            report = await find_report(engine, runtime)
            # What is not installed can be skipped; what is installed and does not work is a failure.
            assert report.available or report.reason in ("not installed", "not supported yet"), report
            rig = Rig(runtime, engine, report)
            yield rig
        await wait_for_no_traces(engine.layout, rig.names)
        assert list_table(engine.layout) is None, "the last one out removes the rules"


async def eventually(question: Callable[[], Awaitable[bool]], what: str, deadline: float = 30.0) -> None:
    """Asks until it is so. For what the kernel or another process does in its own time."""
    try:
        async with asyncio.timeout(deadline):
            while not await question():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None
