"""Machines that lack something that virtual machines need, and what they say of it. Boots nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.engine import EngineError, Runtime
from k8e.engine.local import LocalEngine
from k8e.engine.local.runtime.bundle import HostPath
from k8e.engine.local.vm import firecracker
from k8e.engine.local.vm.guest import load_guest, place_initramfs
from k8e.engine.local.vm.guest_builder import make_disk
from k8e.engine.local.vm.kvm import KvmFailures
from k8e.engine.local.vm.runtime import VmOptions, find_kata
from tests.engine.answers import plant_answers
from tests.engine.rig import Rig, eventually, find_report, place_for_engine
from tests.engine.traces import wait_for_no_traces
from tests.engine.vm.guests import build_test_guest


async def refusal(options: VmOptions) -> EngineError:
    with pytest.raises(EngineError) as raised:
        await find_kata(options)
    return raised.value


async def test_without_a_guest(guest: Path, tmp_path: Path) -> None:
    error = await refusal(VmOptions(tmp_path / "none", emulation=True))
    assert "not built" in error.cause
    assert "build-guest" in error.hint


async def test_emulation_is_never_silent(guest: Path, tmp_path: Path) -> None:
    error = await refusal(VmOptions(guest, kvm=tmp_path / "kvm"))
    assert "kvm" in error.cause
    assert "[runtimes.kata]" in error.hint
    (allowed,) = await find_kata(VmOptions(guest, emulation=True, kvm=tmp_path / "kvm"))
    assert [each.accelerator for each in allowed.variants()] == ["tcg"]
    (tmp_path / "kvm").touch()
    (both,) = await find_kata(VmOptions(guest, emulation=True, kvm=tmp_path / "kvm"))
    assert [(each.accelerator, each.emulated) for each in both.variants()] == [("kvm", False), ("tcg", True)]
    (only,) = await find_kata(VmOptions(guest, kvm=tmp_path / "kvm"))
    assert [each.accelerator for each in only.variants()] == ["kvm"]


@pytest.mark.parametrize("name", ["vmlinuz", "erofs.ko", "guest.json", "host.erofs"])
def test_a_guest_that_was_changed_is_not_booted(guest: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "guest"
    shutil.copytree(guest, folder)
    assert load_guest(folder).digest == load_guest(guest).digest
    with (folder / name).open("r+b") as file:
        file.seek(0, 2 if name == "host.erofs" else 0)
        file.write(b"?")
    with pytest.raises(EngineError, match="damaged"):
        load_guest(folder)


def test_a_guest_that_others_can_write_is_not_booted(guest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "guest"
    shutil.copytree(guest, folder)
    folder.chmod(0o777)
    with pytest.raises(EngineError, match="damaged"):
        load_guest(folder)


def test_the_initramfs_is_the_same_bytes_each_time(guest: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first, second = (place_initramfs(load_guest(guest), folder, vsock=True) for folder in (one, two))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    names = json.loads((guest / "guest.json").read_text())["modules"]
    assert all(name.encode() in first.read_bytes() for name in names)
    without = place_initramfs(load_guest(guest), one, vsock=False).read_bytes()
    assert [name for name in names if name.encode() in without] == [name for name in names if "vsock" not in name]


async def test_firecracker_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guest: Path) -> None:
    """The binary, a /dev/kvm, a guest in its form: all that is known to be missing, and no more."""
    kvm = tmp_path / "kvm"
    found: list[str] = []
    monkeypatch.setattr(firecracker, "find_tool", lambda name: found[0] if found else None)
    assert await find_missing(guest, kvm) == f"firecracker is not installed; there is no {kvm} that can be used"
    kvm.touch()
    assert await find_missing(guest, kvm) == "firecracker is not installed"
    found.append(str(write_script(tmp_path / "firecracker", "echo Firecracker v1.7.0")))
    assert "1.7" in await find_missing(guest, kvm)
    write_script(tmp_path / "firecracker", "echo Firecracker v1.13.1")
    assert "not built" in await find_missing(tmp_path / "none", kvm)
    (runtime,) = await firecracker.find_firecracker(VmOptions(guest, kvm=kvm))
    assert (runtime.name, runtime.emulated, runtime.guest.elf) == (Runtime.FIRECRACKER, False, guest / "vmlinux")


async def find_missing(guest: Path, kvm: Path) -> str:
    with pytest.raises(EngineError) as raised:
        await firecracker.find_firecracker(VmOptions(guest, kvm=kvm))
    assert raised.value.hint
    return raised.value.cause


def write_script(path: Path, code: str) -> Path:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return path


def test_a_silent_kvm_is_remembered_for_what_was_tried(tmp_path: Path) -> None:
    failures = KvmFailures(tmp_path)
    assert failures.recall("kata", ("qemu", 1)) == ""
    failures.remember("kata", ("qemu", 1), "no answer in 10 s")
    assert KvmFailures(tmp_path).recall("kata", ("qemu", 1)) == "no answer in 10 s"
    assert failures.recall("kata", ("qemu", 2)) == "", "another version"
    assert failures.recall("firecracker", ("qemu", 1)) == ""
    path = tmp_path / "kvm-kata.json"
    kept = json.loads(path.read_text())
    for text in (
        json.dumps({**kept, "at": kept["at"] - 90_000}),
        json.dumps({**kept, "at": kept["at"] + 60}),
        "[]",
        "",
    ):
        path.write_text(text)
        assert failures.recall("kata", ("qemu", 1)) == "", "a day ago, not yet, damaged"


async def test_a_disk_is_the_same_bytes_from_the_same_files_in_any_order(guest: Path, tmp_path: Path) -> None:
    digests = []
    for number, order in enumerate((range(40), reversed(range(40)))):
        top = tmp_path / f"usr-{number}"
        for each in order:
            (top / f"part-{each % 5}").mkdir(parents=True, exist_ok=True)
            (top / f"part-{each % 5}" / f"file-{each}").write_text(f"{each}\n" * each)
        os.link(top / "part-1/file-1", top / "part-2/linked")
        image = tmp_path / f"{number}.erofs"
        await make_disk(image, [HostPath(top, "/usr")], ["/usr/part-3"])
        digests.append(hashlib.sha256(image.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.skipif(not os.environ.get("K8E_SOAK"), reason="takes a while: in a soak")
async def test_a_guest_is_the_same_bytes_each_time(guest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    made = await build_test_guest(folder)
    assert made.digest == load_guest(guest).digest
    for name in os.listdir(guest):
        assert (guest / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_whole_check_finds_a_changed_disk_of_the_same_size(guest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "guest"
    shutil.copytree(guest, folder)
    assert load_guest(folder, whole=True).digest == load_guest(guest).digest
    with (folder / "host.erofs").open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    load_guest(folder)
    with pytest.raises(EngineError, match=r"host\.erofs is not what it was made as"):
        load_guest(folder, whole=True)


@contextlib.asynccontextmanager
async def open_engine_with_hanging_kvm(guest: Path, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    """Where a /dev/kvm does not work, the VMM runs and says nothing: so does the program in its place here."""
    (tmp_path / "kvm").touch()
    with place_for_engine() as (state, run), pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8e.engine.local.vm.launcher.qemu_command", lambda _: ["/usr/bin/sleep", "infinity"])
        plant_answers(state)
        engine = LocalEngine(state, run, virtual=VmOptions(guest, kvm=tmp_path / "kvm"))
        try:
            yield engine
        finally:
            await engine.close()
        await wait_for_no_traces(engine.layout, [])


async def test_another_runtime_does_not_wait_for_a_hanging_kvm(
    guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.engine.local.vm.runtime.KVM_DEADLINE", 900.0)  # longer than this test may take
    async with open_engine_with_hanging_kvm(guest, tmp_path) as engine:
        report = await engine.choose()
        assert report.runtime in (Runtime.GVISOR, Runtime.NATIVE)

        async def is_tried() -> bool:
            return any(name.startswith("probe-kata-") for name in await engine.list())

        await eventually(is_tried, "kata is tried behind the first caller", deadline=120.0)
        rig = Rig(report.runtime, engine, report)
        async with rig.room() as room:
            assert await room.output("echo", "well") == "well\n"
            assert await is_tried(), "and still is, as it hangs"


async def test_a_kvm_that_hangs_is_given_up_and_remembered(
    guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.engine.local.vm.runtime.KVM_DEADLINE", 1.0)
    async with open_engine_with_hanging_kvm(guest, tmp_path) as engine:
        report = await find_report(engine, Runtime.KATA)
        assert not report.available
        assert "kvm: no answer in 1 s" in report.reason
        assert "emulation = true" in report.hint
        assert await engine.list() == []
        again = LocalEngine(engine.layout.state, engine.layout.run, virtual=VmOptions(guest, kvm=tmp_path / "kvm"))
        assert "when it was last tried" in (await find_report(again, Runtime.KATA)).reason
        await again.close()
