"""One sandbox of each runtime for everything here, with nothing in front of it but the engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from k8e.core.sessions.interpreters import Kind, plan
from k8e.engine import Limits, Place, Runtime, SandboxSpec
from k8e.engine.local.engine import LocalEngine
from k8e.link.model import ExecSpec, Outcome, Process, Sandbox
from tests.engine.answers import plant_answers
from tests.engine.rig import find_report
from tests.parking.programs import Program
from tests.runtimes import do_without


@dataclass(frozen=True, slots=True)
class Ended:
    """All that whoever asked for a run gets to see of it."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Bed:
    """A sandbox, and the two ways to run a program in it."""

    runtime: Runtime
    sandbox: Sandbox
    place: Place

    async def park(self, kind: Kind, *, keep: float | None = None) -> None:
        await self.sandbox.park(plan(kind, self.place, ()), self.place.loader, keep=keep)

    def spec(self, kind: Kind, program: Program, *, parked: bool) -> ExecSpec:
        return ExecSpec(
            (*kind, program.code.encode("utf-8", "surrogateescape")),
            self.place.env,
            program.cwd.encode() or self.place.workspace,
            identity=self.place.user,
            stdin=program.stdin is not None,
            timeout=30.0,
            parked=parked,
        )

    async def finish(self, process: Process, stdin: bytes | None = None) -> tuple[Ended, Outcome]:
        if stdin is not None:
            with contextlib.suppress(Exception):  # that a program does not read all of it is its own business
                if stdin:
                    await process.write(stdin)
            await process.close_stdin()
        stdout, stderr = b"", b""
        while content := await process.stdout.read():
            stdout += content
        while content := await process.stderr.read():
            stderr += content
        outcome = await process.wait()
        return Ended(stdout, stderr, outcome.exit_code, outcome.signal), outcome

    async def run(self, kind: Kind, program: Program | str, *, parked: bool, **changes: object) -> tuple[Ended, bool]:
        """How it ended, and whether a parked interpreter was it."""
        program = Program(program) if isinstance(program, str) else program
        spec = self.spec(kind, program, parked=parked)
        process = await self.sandbox.start(replace(spec, **changes))  # type: ignore[arg-type]
        ended, _ = await self.finish(process, program.stdin)
        return ended, process.handed_over

    async def command(self, *argv: str) -> Ended:
        """Something around a program: a tool, by the same user."""
        words = tuple(word.encode() for word in argv)
        spec = ExecSpec(words, self.place.env, self.place.workspace, identity=self.place.user, stdin=False)
        return (await self.finish(await self.sandbox.start(spec)))[0]


def make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="k8e-p-"))  # sockets want a short name
    folder.chmod(0o711)  # a native sandbox has ids of its own, and they must reach its root
    return folder


@contextlib.asynccontextmanager
async def make_bed(runtime: Runtime) -> AsyncIterator[Bed]:
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")
    folder = make_folder()
    plant_answers(folder / "s")
    engine = LocalEngine(folder / "s", folder / "r")
    name = f"park-{runtime.value}"
    try:
        report = await find_report(engine, runtime)
        if not report.available:
            do_without(runtime.value, report.reason)
        await engine.create(name, SandboxSpec(runtime, limits=Limits(cpus=2.0, memory=1 << 30)))
        sandbox, place = await engine.attach(name)
        yield Bed(runtime, sandbox, place)
    finally:
        await engine.destroy(name)
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: runtime.value)
async def bed(request: pytest.FixtureRequest) -> AsyncIterator[Bed]:
    async with make_bed(request.param) as made:
        yield made


@pytest.fixture(scope="module")
async def native_bed() -> AsyncIterator[Bed]:
    async with make_bed(Runtime.NATIVE) as made:
        yield made
