"""The guest by its command, `k8e image build-guest`, on a machine whose /var/lib/k8e is the test's own; and what the
machine boots of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine.local.vm.guest import load_guest, place_initramfs
from tests.cli.machine import K8E, Done
from tests.engine.vm.conftest import on_its_day

KEPT = "sbin"  # of what is below /usr: the rest would take minutes
PRIVATELY = 'mount --bind "$0" /var/lib/k8e && exec "$@"'


def build(folder: Path, *words: str) -> Done:
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", PRIVATELY]
    done = subprocess.run(
        [*command, os.fspath(folder), os.fspath(K8E), "image", "build-guest", *words],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": os.fspath(folder)},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder(guest: Path, tmp_path: Path) -> Path:
    """In the place of /var/lib/k8e. `guest`: here is all that it takes to build one."""
    (tmp_path / "tools").mkdir()
    return tmp_path


@on_its_day(0)
def test_it_is_built_from_the_machines_packages_and_checked(folder: Path) -> None:
    left_out = [word for name in sorted(os.listdir("/usr")) if name != KEPT for word in ("--without", f"/usr/{name}")]
    built = build(folder, *left_out).json
    assert built["guest"] == "/var/lib/k8e/guest"
    assert "linux-image" in built["kernel"]
    made = load_guest(folder / "guest", whole=True, elf=True)
    assert (made.digest, made.version) == (built["digest"], built["kernel"])
    names = {*made.modules, "guest.json", "host.erofs", "vmlinux", "vmlinuz"}
    assert set(os.listdir(folder / "guest")) == names
    listed = subprocess.run(
        ["dump.erofs", "--ls", "--path=/usr", os.fspath(made.host_disk)], capture_output=True, text=True, check=True
    ).stdout
    found = {line.split()[-1] for line in listed.splitlines() if line.strip()}
    assert KEPT in found
    assert not {word.removeprefix("/usr/") for word in left_out[1::2]} & found
    assert build(folder, "--check").json == built
    with made.host_disk.open("r+b") as disk:
        disk.seek(5000)
        disk.write(b"?")
    done = build(folder, "--check")
    assert (done.code, done.json["code"]) == (1, "guest_failed")
    assert "host.erofs is not what it was made as" in str(done.json)


@pytest.mark.parametrize(
    ("words", "cause"),
    [(["--check"], "not built"), (["--without", "/etc"], "not below /usr")],
    ids=["check", "without"],
)
def test_what_it_cannot_do_it_says(folder: Path, words: list[str], cause: str) -> None:
    done = build(folder, *words)
    assert (done.code, done.json["code"]) == (1, "guest_failed")
    assert cause in str(done.json)


def test_the_initramfs_has_the_agent_its_starter_and_modules_and_nothing_else(guest: Path, tmp_path: Path) -> None:
    made = load_guest(guest)
    names = list(list_archive(place_initramfs(made, tmp_path, vsock=True).read_bytes()))
    modules = [f"modules/{number:02}-{name}" for number, name in enumerate(made.modules)]
    assert names == ["dev", "dev/console", "modules", *modules, "init", "k8e-agent", "k8e-loader.so", "TRAILER!!!"]


def list_archive(content: bytes) -> Iterator[str]:
    """The names in a cpio archive ("newc"): of each file a head of 110 characters, its name, its bytes."""
    while content:
        assert content[:6] == b"070701", content[:6]
        size, length = int(content[54:62], 16), int(content[94:102], 16)
        yield content[110 : 110 + length - 1].decode()
        begin = -(-(110 + length) // 4) * 4
        content = content[begin + -(-size // 4) * 4 :]
