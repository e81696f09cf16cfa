"""The VMM is lost: the attacker has QEMU's process. A probe stands where it stands (tests/engine/lost/probe.c): in its
namespaces, root and control group, with its user, limits, capabilities, filters and open descriptors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.lost.attempts import FOLLOW_NOT, Ground, Make, list_ways_out
from tests.engine.lost.script import Attempt, Outcome, Zeros, build_probe, read_outcomes, write_script
from tests.engine.rig import Rig, Room, read_host
from tests.engine.test_lost import find_allowed, listener
from tests.engine.vm.conftest import on_its_day

__all__ = ["listener"]
pytestmark = on_its_day(0)
HERE = -100
CREATE, WRITE, READ = os.O_CREAT | os.O_WRONLY | FOLLOW_NOT, os.O_WRONLY | FOLLOW_NOT, os.O_RDONLY | FOLLOW_NOT
SCRATCH, DISK = "/run/k8e", "/k8e/disk"
TAP = 3
KEEP_SIZE, INSERT_RANGE, ZERO_RANGE = 1, 0x20, 0x10
NAMESPACE_OF_TAP, NAMESPACE_OF_SOCKET, ANOTHER_TAP = 0x54E3, 0x894C, 0x400454CA
RESERVE = (0x40305828, 0x4030582A, 0x40305839)
RLIMIT_FSIZE, RLIMIT_NOFILE = 1, 7


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("lost") / "probe"
    build_probe(target)
    return target


def try_at(rig: Rig, room: Room, probe: Path, attempts: Sequence[Attempt], script: Path) -> list[Outcome]:
    (pid,) = rig.host_processes(room.name)
    script.write_text(write_script(attempts))
    enter = 'for group; do echo $$ > "$group/cgroup.procs"; done; exec "$PROBE" "$VMM" "$SCRIPT"'
    command = ["sh", "-c", enter, "sh", *map(os.fspath, rig.cgroups(room.name))]
    environment = {"PROBE": os.fspath(probe), "VMM": str(pid), "SCRIPT": os.fspath(script), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done
    outcomes = read_outcomes(done.stdout)
    assert len(outcomes) == len(attempts), done
    return outcomes


def one(call: str, *arguments: int | str | Zeros) -> Make:
    return lambda attempt, _: attempt.call(call, *arguments)


def on_disk(call: str, *arguments: int | str | Zeros) -> Make:
    return lambda attempt, _: attempt.call(call, attempt.call("openat", HERE, DISK, os.O_RDWR, 0), *arguments)


def on_file(call: str, *arguments: int) -> Make:
    return lambda attempt, _: attempt.call(
        call, attempt.call("openat", HERE, f"{SCRATCH}/own", os.O_CREAT | os.O_RDWR, 0o600), *arguments
    )


def list_attempts(rig: Rig, room: Room, size: int) -> Iterator[tuple[str, Make]]:
    for path in ("/k8e/kernel", "/k8e/initramfs", "/k8e/base", "/usr/bin/env", "/proc/sys/kernel/core_pattern"):
        yield f"write {path}", one("openat", HERE, path, WRITE, 0)
        yield f"remove {path}", one("unlinkat", HERE, path, 0)
    for folder in ("", "/etc", "/tmp", "/dev", "/k8e", "/usr/bin", "/proc/self"):
        yield f"create in {folder}/", one("openat", HERE, f"{folder}/made", CREATE, 0o644)
    layout = rig.engine.layout
    machine = (layout.state, layout.run, room.paths.record, room.paths.top, room.paths.bundle, Path("/root"))
    for path in (*map(os.fspath, machine), "/etc/shadow", "/etc/passwd", "/var/lib/dpkg", "/home", "/sys", "/srv"):
        for way in ("", "/proc/1/root", "/proc/self/root", "/proc/self/cwd/../../.."):
            yield f"read {way}{path}", one("openat", HERE, f"{way}{path}", READ, 0)
    for name in ("kvm", "net/tun", "mem", "kmsg", "vhost-net", "vhost-vsock", "loop-control", "sda", "fuse", "null"):
        if name != "null":
            yield f"device {name}", one("openat", HERE, f"/dev/{name}", os.O_RDWR, 0)
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        yield f"make device {kind:o}", one("mknodat", HERE, f"{SCRATCH}/device", kind | 0o666, os.makedev(1, 5))
    for mode in (0o4755, 0o2755, 0o6755):
        yield f"own file {mode:o}", on_file("fchmod", mode)
        yield f"disk {mode:o}", on_disk("fchmod", mode)
        yield f"make file {mode:o}", one("openat", HERE, f"{SCRATCH}/made-{mode:o}", os.O_CREAT | os.O_RDWR, mode)
    # What the machine keeps of its disk: no more than its size.
    yield "longer disk", on_disk("ftruncate", size + 1)
    yield "write behind the end", on_disk("pwrite64", "here", 4, size)
    for fallocate in (0, KEEP_SIZE, INSERT_RANGE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE):
        yield f"reserve {fallocate}", on_disk("fallocate", fallocate, 0 if fallocate == INSERT_RANGE else size, 1 << 20)
    for request in RESERVE:
        yield f"reserve by {request:x}", on_disk("ioctl", request, Zeros())
    yield "more for a file", lambda attempt, _: attempt.call("prlimit64", 0, RLIMIT_FSIZE, "\x7f" * 16, 0)
    yield "more files", lambda attempt, _: attempt.call("prlimit64", 0, RLIMIT_NOFILE, "\x7f" * 16, 0)
    for user in (0, 1, 2000):
        yield f"user {user}", one("setresuid", user, user, user)
    yield "the machine's network by its tap", one("ioctl", TAP, NAMESPACE_OF_TAP, 0)
    yield "another tap", one("ioctl", TAP, ANOTHER_TAP, "k8e-other\x00\x00\x00\x00\x00\x00\x00\x02\x50")
    yield (
        "its own network by a socket",
        lambda attempt, _: attempt.call("ioctl", attempt.call("socket", 1, 1, 0), NAMESPACE_OF_SOCKET, 0),
    )
    yield "another program", one("execve", "/usr/bin/id", Zeros(), Zeros())
    yield from list_ways_out()


async def test_nothing_is_gained_on_the_machine(
    rig: Rig, room: Room, probe: Path, listener: socket.socket, tmp_path: Path
) -> None:
    size = os.stat(room.paths.disk_image).st_size
    before = stat_disk(room)
    control = Attempt("control")
    control.call("pwrite64", control.call("openat", HERE, f"{SCRATCH}/own", os.O_CREAT | os.O_RDWR, 0o600), "x", 1, 0)
    control.call("fallocate", control.call("openat", HERE, DISK, os.O_RDWR, 0), 3, size - 4096, 4096)
    attempts = [control]
    for name, make in list_attempts(rig, room, size):
        attempts.append(Attempt(name))
        make(attempts[-1], Ground(HERE, SCRATCH, "/"))
    first, *outcomes = await asyncio.to_thread(try_at, rig, room, probe, attempts, tmp_path / "script")
    assert (first.killed, min(first.results) >= 0, len(first.results)) == (None, True, 4), first.describe()
    # Beyond the limit of a file's size the kernel ends the process.
    wrong = [
        text for text in find_allowed(attempts[1:], outcomes) if not text.endswith(f"killed by {signal.SIGXFSZ:d}")
    ]
    assert wrong == []
    assert stat_disk(room) == before
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert await room.output("echo", "well") == "well\n"


def stat_disk(room: Room) -> tuple[int, int]:
    status = os.stat(room.paths.disk_image)
    return status.st_size, stat.S_IMODE(status.st_mode)


async def test_it_is_one_of_its_control_groups_and_has_their_limits(rig: Rig, room: Room) -> None:
    (pid,) = rig.host_processes(room.name)
    groups = {line.split(":", 2)[2] for line in read_host(f"/proc/{pid}/cgroup").splitlines()}
    own = rig.cgroups(room.name)
    assert any(group.endswith(f"/{room.name}") for group in groups)
    found = {name: read_first(own, *files) for name, files in LIMIT_FILES.items()}
    assert 0 < int(found["memory"]) < 1 << 30, found
    assert 0 < int(found["processes"]) < 128, found
    assert not found["quota"].startswith(("max", "-1")), found
    devices = read_first(own, "devices.list", missing="")
    # runc lets a root make nodes (m), which a VMM is not.
    used = [line for line in devices.splitlines() if set(line.split()[2]) & set("rw")]
    assert all(line.startswith("c ") and "*:" not in line for line in used), "devices by name, and no disk"


LIMIT_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "processes": ("pids.max",),
    "quota": ("cpu.max", "cpu.cfs_quota_us"),
}


def read_first(groups: Sequence[Path], *names: str, missing: str | None = None) -> str:
    for path in (group / name for group in groups for name in names):
        if path.exists():
            return path.read_text().strip()
    assert missing is not None, names
    return missing
