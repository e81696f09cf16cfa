"""The agent's executable: small, static, reproducible, pinned, and verified before it is placed."""

from __future__ import annotations

import platform
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.link.binary import (
    PINNED,
    PINNED_GUESTS,
    PINNED_LOADERS,
    PINNED_PODS,
    BinaryMismatch,
    BinaryMissing,
    UnknownMachine,
    VerifiedBinary,
    agent_binary,
    loader_library,
    place,
    pod_agent_binary,
)
from scripts import build_agent

# In a fresh clone the compiler builds its own library first, for both architectures.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
DEV = BUILD / "agent" / "k8e-agent"
HERE = platform.machine()

SIZE_LIMIT = 64 * 1024
POD_SIZE_LIMIT = 128 * 1024
ALL_PINNED = {**PINNED, **PINNED_PODS, **PINNED_LOADERS, **PINNED_GUESTS}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
PT_DYNAMIC, PT_INTERP, PT_GNU_STACK = 2, 3, 0x6474E551
SHT_SYMTAB = 2
PF_X = 1


def read_program_headers(elf: bytes) -> Iterator[tuple[int, int]]:
    """(type, flags) of every segment of a little-endian 64-bit ELF."""
    offset, size, count = *struct.unpack_from("<Q", elf, 32), *struct.unpack_from("<HH", elf, 54)
    for index in range(count):
        yield struct.unpack_from("<II", elf, offset + index * size)


def read_section_types(elf: bytes) -> Iterator[int]:
    offset, size, count = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HH", elf, 58)
    for index in range(count):
        yield struct.unpack_from("<I", elf, offset + index * size + 4)[0]


def check_executable(elf: bytes, machine: str, limit: int = SIZE_LIMIT) -> None:
    assert elf[:6] == b"\x7fELF\x02\x01"
    assert struct.unpack_from("<H", elf, 18)[0] == ELF_MACHINES[machine]
    segments = dict(read_program_headers(elf))
    assert PT_INTERP not in segments, "needs a loader that an image may not have"
    assert PT_DYNAMIC not in segments, "needs libraries that an image may not have"
    assert not segments.get(PT_GNU_STACK, PF_X) & PF_X, "executable stack"
    assert SHT_SYMTAB not in set(read_section_types(elf)), "not stripped"
    assert len(elf) <= limit


class Release:
    """The release build, made once for all tests here, in a folder that is not the checkout."""

    def __init__(self, folder: Path) -> None:
        self.hashes = build(folder / "one" / "agent", folder / "out")
        self.folder = folder / "out"

    def read(self, machine: str) -> bytes:
        return (self.folder / f"k8e-agent-{machine}").read_bytes()


def build(sources: Path, target: Path) -> dict[str, str]:
    """Copies the sources and builds there, with zig's cache for libc shared and the one for our own objects fresh."""
    shutil.copytree(ROOT / "agent", sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(build_agent.ZIG_CACHE))
        patch.setenv("ZIG_LOCAL_CACHE_DIR", str(target / "cache"))
        return build_agent.build_release(sources, target)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(tmp_path_factory.mktemp("release"))


class Project:
    """A copy of what the wheel is made from, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("agent", "proto", "scripts", "skills", "src"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_agent"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, folder)

    def build_wheel(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)

    def read_wheels(self) -> list[Path]:
        return list((self.folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = Project(tmp_path_factory.mktemp("wheel"))
    done = project.build_wheel()
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = project.read_wheels()
    return path


class TestDevelopmentBuild:
    def test_is_small_static_and_stripped(self) -> None:
        check_executable(DEV.read_bytes(), HERE)

    def test_is_found_and_verified_in_a_checkout(self) -> None:
        binary = agent_binary()
        assert binary.machine == HERE
        assert binary.content == DEV.read_bytes()

    def test_of_pods_is_found_and_verified_in_a_checkout(self) -> None:
        content = DEV.with_name("k8e-agent-pod").read_bytes()
        assert pod_agent_binary().content == content
        check_executable(content, HERE, POD_SIZE_LIMIT)

    def test_is_refused_when_it_is_not_the_one_that_was_built(self, tmp_path: Path) -> None:
        copied = tmp_path / "build" / "agent"
        copied.mkdir(parents=True)
        shutil.copy(DEV.with_name("k8e-agent.sha256"), copied)
        (copied / "k8e-agent").write_bytes(flip_byte(DEV.read_bytes()))
        with pytest.raises(BinaryMismatch, match="make agent"):
            agent_binary(checkout=tmp_path)

    def test_says_what_to_do_when_it_was_not_built(self, tmp_path: Path) -> None:
        with pytest.raises(BinaryMissing, match="make agent"):
            agent_binary(checkout=tmp_path)

    def test_says_what_to_do_for_the_other_architecture(self, tmp_path: Path) -> None:
        (other,) = set(PINNED) - {HERE}
        with pytest.raises(BinaryMissing, match="make release"):
            agent_binary(other, checkout=tmp_path)

    def test_an_unknown_machine_is_named(self) -> None:
        with pytest.raises(UnknownMachine, match="riscv64"):
            agent_binary("riscv64")


class TestLoader:
    def test_is_small_and_needs_no_library(self, release: Release) -> None:
        for machine in PINNED:
            library = (release.folder / f"k8e-loader-{machine}.so").read_bytes()
            assert struct.unpack_from("<H", library, 18)[0] == ELF_MACHINES[machine]
            assert PT_INTERP not in dict(read_program_headers(library))
            assert len(library) <= SIZE_LIMIT
            # Whatever needs one names it by its file.
            assert b".so." not in library

    def test_is_found_and_verified_in_a_checkout(self) -> None:
        assert loader_library().content == DEV.with_name("k8e-loader.so").read_bytes()

    def test_is_refused_when_it_is_not_the_one_that_was_built(self, tmp_path: Path) -> None:
        copied = tmp_path / "build" / "agent"
        copied.mkdir(parents=True)
        shutil.copy(DEV.with_name("k8e-loader.so.sha256"), copied)
        (copied / "k8e-loader.so").write_bytes(flip_byte(DEV.with_name("k8e-loader.so").read_bytes()))
        with pytest.raises(BinaryMismatch, match="make agent"):
            loader_library(checkout=tmp_path)


class TestReleaseBuild:
    @pytest.mark.parametrize("machine", PINNED)
    def test_is_small_static_and_stripped(self, release: Release, machine: str) -> None:
        check_executable(release.read(machine), machine)

    @pytest.mark.parametrize("machine", PINNED)
    def test_that_of_pods_is_small_static_and_stripped(self, release: Release, machine: str) -> None:
        elf = (release.folder / f"k8e-agent-pod-{machine}").read_bytes()
        check_executable(elf, machine, POD_SIZE_LIMIT)
        assert b"/tmp/" not in elf
        assert str(ROOT).encode() not in elf
        assert b"crypto.zig" not in elf

    def test_is_the_same_from_another_folder(self, release: Release, tmp_path: Path) -> None:
        assert build(tmp_path / "a longer name" / "agent", tmp_path / "out") == release.hashes

    def test_is_the_pinned_one(self, release: Release) -> None:
        assert release.hashes == ALL_PINNED, "after a change of the agent: make pin"

    def test_names_no_folder_of_the_machine_it_was_built_on(self, release: Release) -> None:
        for machine in PINNED:
            assert b"/tmp/" not in release.read(machine)
            assert str(ROOT).encode() not in release.read(machine)


class TestPackaged:
    @pytest.fixture
    def packaged(self, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "_agent"
        folder.mkdir()
        for machine in PINNED:
            shutil.copy(release.folder / f"k8e-agent-{machine}", folder)
            shutil.copy(release.folder / f"k8e-loader-{machine}.so", folder)
        monkeypatch.setattr("k8e.link.binary.PINNED", {name: release.hashes[name] for name in PINNED})
        monkeypatch.setattr("k8e.link.binary.PINNED_LOADERS", {name: release.hashes[name] for name in PINNED_LOADERS})
        return folder

    @pytest.mark.parametrize("machine", PINNED)
    def test_is_found_for_either_architecture(self, packaged: Path, release: Release, machine: str) -> None:
        assert agent_binary(machine, packaged=packaged).content == release.read(machine)

    @pytest.mark.parametrize("machine", PINNED)
    def test_its_loader_is_found_for_either_architecture(self, packaged: Path, release: Release, machine: str) -> None:
        expected = (release.folder / f"k8e-loader-{machine}.so").read_bytes()
        assert loader_library(machine, packaged=packaged).content == expected

    def test_a_flipped_byte_is_refused(self, packaged: Path) -> None:
        path = packaged / f"k8e-agent-{HERE}"
        path.write_bytes(flip_byte(path.read_bytes()))
        with pytest.raises(BinaryMismatch, match="install the k8e package again"):
            agent_binary(packaged=packaged)

    def test_a_missing_one_does_not_fall_back_to_the_checkout(self, packaged: Path) -> None:
        (packaged / f"k8e-agent-{HERE}").unlink()
        with pytest.raises(BinaryMissing, match="install the k8e package again"):
            agent_binary(packaged=packaged)


class TestPlacing:
    def test_writes_the_verified_bytes_executable(self, tmp_path: Path) -> None:
        target = tmp_path / "agent"
        place(VerifiedBinary("x86_64", "", b"#!/bin/true\n"), target)
        assert target.read_bytes() == b"#!/bin/true\n"
        assert stat.S_IMODE(target.stat().st_mode) == 0o755
        assert list(tmp_path.iterdir()) == [target]

    def test_replaces_without_touching_what_runs(self, tmp_path: Path) -> None:
        target = tmp_path / "agent"
        place(VerifiedBinary("x86_64", "", b"old"), target)
        with target.open("rb") as running:
            place(VerifiedBinary("x86_64", "", b"new"), target)
            assert running.read() == b"old"
        assert target.read_bytes() == b"new"

    def test_does_not_write_through_a_symlink(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_bytes(b"mine")
        target = tmp_path / "agent"
        target.symlink_to(victim)
        place(VerifiedBinary("x86_64", "", b"agent"), target)
        assert victim.read_bytes() == b"mine"
        assert not target.is_symlink()

    def test_leaves_nothing_behind_when_it_fails(self, tmp_path: Path) -> None:
        (tmp_path / "agent").mkdir()
        with pytest.raises(OSError, match="agent"):
            place(VerifiedBinary("x86_64", "", b"agent"), tmp_path / "agent")
        assert [path.name for path in tmp_path.iterdir()] == ["agent"]


class TestWheel:
    def test_carries_the_pinned_agents_and_the_types(self, wheel: Path) -> None:
        names = zipfile.ZipFile(wheel).namelist()
        assert {f"k8e/_agent/k8e-agent-{machine}" for machine in PINNED} <= set(names)
        assert {f"k8e/_agent/k8e-loader-{machine}.so" for machine in PINNED} <= set(names)
        assert {f"k8e/_agent/k8e-guest-{machine}" for machine in PINNED} <= set(names)
        assert {f"k8e/_agent/k8e-agent-pod-{machine}" for machine in PINNED} <= set(names)
        assert "k8e/py.typed" in names
        assert "k8e/cli/install/k8e.service" in names
        assert [name for name in names if "standalone" in name] == [], "a program of its own"

    def test_installed_elsewhere_it_verifies_and_places(self, wheel: Path, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
        python = str(tmp_path / "venv" / "bin" / "python")
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--offline", "--no-deps", "--python", python]
        subprocess.run([*install, str(wheel)], check=True)
        code = (
            "import sys, pathlib; from k8e.link.binary import *; assert 'site-packages' in place.__code__.co_filename;"
            "place(agent_binary(), pathlib.Path(sys.argv[1])); agent_binary('aarch64'); print(agent_binary().sha256)"
        )
        target = tmp_path / "agent"
        # -I: nothing of this checkout's environment.
        done = subprocess.run([python, "-I", "-c", code, str(target)], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, PINNED[HERE], "")
        check_executable(target.read_bytes(), HERE)
        # It brings its skill, too.
        script = [str(tmp_path / "venv" / "bin" / "k8e"), "sandbox-install-skill", "claude"]
        subprocess.run(script, env={"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, check=True)
        skill = Path(".claude/skills/k8e-sandbox-skill/SKILL.md")
        assert (tmp_path / skill).read_bytes() == (ROOT / "skills/k8e-sandbox-skill/SKILL.md").read_bytes()

    def test_is_not_built_with_an_agent_that_is_not_the_pinned_one(self, release: Release, tmp_path: Path) -> None:
        project = Project(tmp_path / "project")
        hashes = {**ALL_PINNED, "x86_64": "a" * 64}
        build_agent.write_pins(hashes, project.folder / "src/k8e/link/binary.py")
        done = project.build_wheel()
        assert done.returncode != 0
        assert "make pin" in done.stderr
        assert project.read_wheels() == []


def flip_byte(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
