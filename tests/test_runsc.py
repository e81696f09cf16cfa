"""Whichever runsc a machine has: the distribution's, the one that `make runsc` builds, or one that does not work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import Runtime, RuntimeReport
from k8e.engine.local import LocalEngine
from k8e.engine.local.runtime import runtime
from k8e.engine.local.runtime.runtime import OciRuntime
from k8e.engine.local.system.tool import find_tool
from scripts import build_runsc
from tests.engine.answers import plant_answers
from tests.engine.rig import Rig, find_report, open_engine, place_for_engine

DISTRIBUTION = find_tool("runsc")
BUILT = os.fspath(build_runsc.BINARY)
NAMESPACE_STACK = "network: the stack of the sandbox's namespace (--network=host)"
OWN_STACK = "network: gVisor's own stack (--network=sandbox)"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the local engine needs root")
needs_distribution = pytest.mark.skipif(DISTRIBUTION is None, reason="the distribution's runsc is not installed")
needs_built = pytest.mark.skipif(not os.path.exists(BUILT), reason="`make runsc` has not built one (it needs Go)")
both = pytest.mark.parametrize(
    "binary",
    [
        pytest.param(DISTRIBUTION, id="distribution", marks=needs_distribution),
        pytest.param(BUILT, id="built", marks=needs_built),
    ],
)


class Machine:
    """A machine on which other runscs are installed than on this one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(runtime, "OWN_BINARIES", folder / "own")
        self.install_package(None)

    def install_package(self, path: str | None) -> None:
        self.monkeypatch.setattr(runtime, "find_tool", lambda name: path if name == "runsc" else find_tool(name))

    def build(self, path: str) -> None:
        (self.folder / "own").mkdir()
        (self.folder / "own" / "runsc").symlink_to(path)

    def script(self, version: str) -> str:
        """A runsc that tells a version and can do nothing else."""
        path = self.folder / f"runsc-{version}"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exit 3\necho "runsc version {version}"\n')
        path.chmod(0o755)
        return os.fspath(path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def gvisor_engine() -> AsyncIterator[LocalEngine]:
    with place_for_engine() as (state, run):
        plant_answers(state)
        async with open_engine(state, run) as engine:
            yield engine


async def examine() -> RuntimeReport:
    async with gvisor_engine() as engine:
        return await find_report(engine, Runtime.GVISOR)


@needs_root
@both
class TestEach:
    @pytest.fixture
    async def rig(self, binary: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
        usual = (await runtime.find_runtimes(Runtime.GVISOR))[0]

        async def only_this(wanted: Runtime) -> Sequence[OciRuntime]:
            return [replace(usual, binary=binary)] if wanted is Runtime.GVISOR else []

        monkeypatch.setattr("k8e.engine.local.engine.find_runtimes", only_this)
        async with gvisor_engine() as engine:
            yield Rig(Runtime.GVISOR, engine, await find_report(engine, Runtime.GVISOR))

    async def test_starts_a_sandbox_that_runs_commands(self, rig: Rig) -> None:
        assert rig.report.available, rig.report
        async with rig.room() as room:
            assert await room.output("sh", "-c", "id -un; pwd") == "user\n/workspace\n"

    async def test_has_a_network_stack_for_sandboxes_with_a_network(self, rig: Rig) -> None:
        """Kernels from 6.15 on and runscs before 2025 do not get along; the namespace's stack serves there."""
        assert rig.report.notes[0] in (OWN_STACK, NAMESPACE_STACK)

    async def test_can_read_through_and_about_symbolic_links(self, rig: Rig) -> None:
        async with rig.room() as room:
            assert await room.output("readlink", "/home/user/.venv/bin/python") == "python3\n"
            assert (
                await room.output("sh", "-c", "ln -s /etc/passwd l && head -n 1 l")
                == "root:x:0:0:root:/root:/bin/bash\n"
            )


@needs_built
class TestBuilt:
    async def test_is_the_pinned_version(self) -> None:
        assert build_runsc.pinned_version() in await OciRuntime(Runtime.GVISOR, BUILT, native=False).version()

    @needs_root
    async def test_is_preferred_over_an_older_one(self, machine: Machine) -> None:
        machine.install_package(DISTRIBUTION)
        machine.build(BUILT)
        report = await examine()
        assert build_runsc.pinned_version() in report.version

    @needs_root
    async def test_has_its_own_network_stack(self, machine: Machine) -> None:
        machine.build(BUILT)
        assert (await examine()).notes == (OWN_STACK,)

    @needs_root
    async def test_lists_symbolic_links_without_complaint(self, machine: Machine) -> None:
        """Debian 12's, from 2024, answers EBADF when asked for a link's attributes."""
        machine.build(BUILT)
        async with gvisor_engine() as engine:
            rig = Rig(Runtime.GVISOR, engine, await find_report(engine, Runtime.GVISOR))
            async with rig.room() as room:
                listed = await room.run("ls", "-la", "/home/user/.venv/bin", "/bin")
        assert (listed.outcome.exit_code, listed.stderr) == (0, b"")


class TestChoice:
    @pytest.mark.parametrize(
        ("own", "packaged", "first"),
        [
            ("v0.0.0-20260701204157-69c2d17aea96", "0.0~20240729.0", "own"),
            ("release-20240212.0", "0.0~20240729.0", "packaged"),
            ("VERSION_MISSING", "0.0~20221219.0", "packaged"),
        ],
    )
    async def test_the_newest_comes_first(self, machine: Machine, own: str, packaged: str, first: str) -> None:
        machine.build(machine.script(own))
        machine.install_package(machine.script(packaged))
        found = [candidate.binary for candidate in await runtime.find_runtimes(Runtime.GVISOR)]
        expected = [os.fspath(machine.folder / "own" / "runsc"), machine.script(packaged)]
        assert found == (expected if first == "own" else expected[::-1])

    @needs_root
    @needs_distribution
    async def test_one_that_does_not_work_is_passed_over_and_named(self, machine: Machine) -> None:
        machine.build(machine.script("release-20991231.0"))
        machine.install_package(DISTRIBUTION)
        report = await examine()
        assert report.available
        assert "2099" not in report.version
        assert report.notes[-1].startswith(f"{machine.folder}/own/runsc does not work: ")

    @needs_root
    async def test_when_none_works_the_report_says_what_each_said_and_what_to_do(self, machine: Machine) -> None:
        machine.install_package(machine.script("release-20991231.0"))
        report = await examine()
        assert not report.available
        assert "runsc-release-20991231.0 does not work: --network=sandbox: exit status 3" in report.reason
        assert "apt-get install runsc" in report.hint

    @needs_root
    async def test_without_any_it_is_not_installed(self, machine: Machine) -> None:
        report = await examine()
        assert (report.available, report.reason) == (False, "not installed")


class TestBuilding:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build_runsc, "SCRATCH", tmp_path / "scratch")
        monkeypatch.setattr(build_runsc, "BINARY", tmp_path / "bin" / "runsc")
        monkeypatch.setattr(build_runsc, "INSTALLED", tmp_path / "state" / "bin" / "runsc")

    @pytest.fixture
    def go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A Go whose result, and whether there is one, the test decides; it counts how often it was asked."""
        go = tmp_path / "go"
        go.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\n. {tmp_path}/answer\n")
        go.chmod(0o755)
        monkeypatch.setattr(build_runsc, "find_go", lambda: str(go))
        return go

    @staticmethod
    def answer(go: Path, script: str) -> None:
        go.with_name("answer").write_text(script)

    @staticmethod
    def times_asked(go: Path) -> int:
        return go.with_name("asked").read_text().count("\n")

    def write_runsc(self, version: str) -> str:
        return f'printf \'#!/bin/sh\\necho runsc version {version}\\n\' > "$4"; chmod +x "$4"\n'

    def test_without_go_it_says_so_and_other_verbs_go_on(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(build_runsc, "find_go", lambda: None)
        assert [build_runsc.main([]), build_runsc.main(["--if-possible"])] == [1, 0]
        assert capsys.readouterr().err.count("Go is not installed") == 2

    def test_is_built_once_and_installed_for_the_engine(self, go: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.answer(go, self.write_runsc(build_runsc.pinned_version()))
        assert build_runsc.main([]) == 0
        capsys.readouterr()
        assert build_runsc.main([]) == 0
        assert (self.times_asked(go), capsys.readouterr().err) == (1, "")
        if os.geteuid() == 0:
            assert build_runsc.INSTALLED.read_bytes() == build_runsc.BINARY.read_bytes()
            assert os.listdir(build_runsc.INSTALLED.parent) == ["runsc"]

    def test_another_version_than_the_pinned_one_is_refused(self, go: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.answer(go, self.write_runsc("VERSION_MISSING"))
        assert build_runsc.main([]) == 1
        assert "calls itself 'runsc version VERSION_MISSING" in capsys.readouterr().err
        assert not build_runsc.BINARY.exists()

    def test_a_failure_is_told_and_repeated_only_on_request(self, go: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.answer(go, "echo no way to the modules >&2; exit 1\n")
        assert [build_runsc.main(["--if-possible"]) for _ in range(3)] == [0, 0, 0]
        assert self.times_asked(go) == 1
        assert "no way to the modules" in capsys.readouterr().err
        self.answer(go, self.write_runsc(build_runsc.pinned_version()))
        assert build_runsc.main([]) == 0
        assert self.times_asked(go) == 2

    def test_every_module_is_fixed_by_its_content(self) -> None:
        sums = (build_runsc.MODULE / "go.sum").read_text().splitlines()
        assert any(line.startswith(f"gvisor.dev/gvisor {build_runsc.pinned_version()} h1:") for line in sums)
