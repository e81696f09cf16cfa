"""Machines that a test makes on this one: network, mount, pid and control-group namespaces, on one bridge."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

from k8e.cluster.build import default_cache

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path("/sys/fs/cgroup")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONPATH": str(ROOT),
}


class Segment:
    """A network segment: a bridge in a network namespace of its own, so that the real machine is not in it."""

    def __init__(self, folder: Path, network: str = "10.99.7.0/24") -> None:
        self.folder = folder
        self.network = IPv4Network(network)
        self.tag = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
        self._keeper = subprocess.Popen(["unshare", "--net", "--kill-child", "--fork", "sleep", "infinity"])
        self.machines: list[Machine] = []
        self._wait_unshared()
        self.run("ip", "link", "add", "segment", "type", "bridge")
        self.run("ip", "address", "add", f"{self.network[1]}/24", "dev", "segment")
        self.run("ip", "link", "set", "segment", "up")

    def _wait_unshared(self) -> None:
        own = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 60
        while os.readlink(f"/proc/{self._keeper.pid}/ns/net") == own:
            assert time.monotonic() < end
            time.sleep(0.01)

    def run(self, *command: str) -> str:
        wrapped = ["nsenter", f"--net=/proc/{self._keeper.pid}/ns/net", *command]
        return subprocess.run(wrapped, check=True, capture_output=True, text=True).stdout

    def connect(self, pid: int, name: str) -> None:
        self.run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.run("ip", "link", "set", name, "master", "segment", "up")

    def make(self, name: str) -> Machine:
        machine = Machine(self, name, str(self.network[10 + len(self.machines)]))
        self.machines.append(machine)
        machine.boot()
        return machine

    def close(self) -> None:
        for machine in self.machines:
            machine.cut_power()
            machine.remove()
        self._keeper.kill()
        self._keeper.wait()


class Machine:
    def __init__(self, segment: Segment, name: str, address: str) -> None:
        self.segment, self.name, self.address = segment, name, address
        self.folder = segment.folder / name
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o711)
        self.group = f"kmb-{segment.tag}-{name}"
        self._boot: subprocess.Popen[str] | None = None
        self._pid = 0
        self._boots = 0
        self._started: list[subprocess.Popen[str]] = []

    def boot(self) -> None:
        groups = _hierarchies()
        for hierarchy in groups:
            group = hierarchy / self.group
            group.mkdir(exist_ok=True)
            for value in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / value).exists() and (group / value).exists():
                    (group / value).write_text((hierarchy / value).read_text())
        unshare = "exec unshare --net --mount --pid --cgroup --uts --fork --kill-child --mount-proc"
        arguments = f"{self.folder} {default_cache()} {self.address}/24"
        script = f"{self._join_groups()}{unshare} {sys.executable} -m tests.members.boot {arguments}"
        self._boot = subprocess.Popen(
            ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._boot.stdin is not None
        assert self._boot.stdout is not None
        assert self._boot.stdout.readline() == "unshared\n"
        self._pid = find_child(self._boot.pid)
        self._boots += 1
        # The kernel removes the last one's link a moment after its namespace.
        self.segment.connect(self._pid, f"{self.name}-{self._boots}")
        self._boot.stdin.write("\n")
        self._boot.stdin.flush()
        assert self._boot.stdout.readline() == "up\n"

    def enter(self) -> list[str]:
        """In front of a command. A process enters the control groups first: the namespace alone would not move it."""
        nsenter = f"exec nsenter --target={self._pid} --net --mount --pid --cgroup --uts"
        return ["/bin/sh", "-c", f'{self._join_groups()}{nsenter} "$@"', "sh"]

    def _join_groups(self) -> str:
        return "".join(f"echo $$ > {hierarchy / self.group / 'cgroup.procs'}; " for hierarchy in _hierarchies())

    def run(self, *command: str, given: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.enter(), *command], input=given, capture_output=True, text=True, env=ENVIRONMENT, timeout=200
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Starts a command that goes on."""
        with open(self.folder / "command.log", "ab") as log:
            process = subprocess.Popen(
                [*self.enter(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env={**ENVIRONMENT, **environment},
            )
        self._started.append(process)
        return process

    def cut_power(self) -> None:
        """Ends every process at once, as a power failure does; files stay."""
        if self._boot is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            for process in (self._boot, *self._started):
                process.wait()
            self._started = []
            self._boot.stdin.close()  # type: ignore[union-attr]
            self._boot.stdout.close()  # type: ignore[union-attr]
            self._boot = None

    def lose_disk(self) -> None:
        """Removes the files that survive a restart. The power is off."""
        assert self._boot is None
        shutil.rmtree(self.folder / "disk")
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()

    def set_link(self, state: str) -> None:
        """Cuts the machine off from the others ("down"), or connects it again ("up"). It does not notice by itself."""
        self.segment.run("ip", "link", "set", f"{self.name}-{self._boots}", state)

    def remove(self) -> None:
        end = time.monotonic() + 60
        for hierarchy in _hierarchies():
            while (hierarchy / self.group).exists():
                for folder, _, _ in os.walk(hierarchy / self.group, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
                assert time.monotonic() < end, hierarchy / self.group
                time.sleep(0.02)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def make_segment(folder: Path) -> Iterator[Segment]:
    segment = Segment(folder)
    try:
        yield segment
    finally:
        segment.close()


def read_json(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    return found


def _hierarchies() -> list[Path]:
    if (GROUPS / "cgroup.controllers").exists():
        return [GROUPS]
    return sorted(path for path in GROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def find_child(pid: int) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("the machine's first process is not there")
