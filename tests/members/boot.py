"""The first process of a machine that a test has made: hides the real machine's files and control groups, and waits.

    python -m tests.members.boot FOLDER BINARIES ADDRESS/PREFIX

FOLDER/state becomes /var/lib/k8e, and changes of /etc and /usr/local go to FOLDER/disk: what survives a restart of the
machine is there. BINARIES becomes /run/binaries, where every user reaches it. It says "up" when the machine can be
used.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from ipaddress import IPv4Interface
from pathlib import Path

from k8e.cluster.namespaces import enter_mounts

GROUPS = Path("/sys/fs/cgroup")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def enter_groups() -> None:
    """Mounts the control groups anew: the namespace shows those of this machine only."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4]
        kind, _, options = line.partition(" - ")[2].split(" ")
        if point.startswith(f"{GROUPS}/") and kind in ("cgroup", "cgroup2"):
            names = [each for each in options.split(",") if each not in ("rw", "ro") and "release_agent" not in each]
            found.append((point, kind, ",".join(names)))
    for point, kind, options in found:
        run("umount", point)
        run("mount", "-t", kind, *(["-o", options] if options and kind == "cgroup" else []), kind, point)


def overlay(folder: Path, *targets: str) -> None:
    """Keeps changes of these folders of the real machine to this one."""
    for target in targets:
        disk = folder / "disk" / target.strip("/").replace("/", "-")
        for name in ("upper", "work"):
            (disk / name).mkdir(parents=True, exist_ok=True)
        (disk / "upper").chmod(0o755)
        options = f"lowerdir={target},upperdir={disk / 'upper'},workdir={disk / 'work'}"
        run("mount", "-t", "overlay", "-o", options, "overlay", target)


def main() -> int:
    folder, binaries, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    descriptor = os.open(binaries, os.O_PATH | os.O_DIRECTORY)
    state = os.open(folder / "state", os.O_PATH | os.O_DIRECTORY)
    sources = Path(__file__).resolve().parents[2]
    enter_mounts([folder, sources, Path(sys.prefix), Path(sys.base_prefix)])
    for target, found in (("/run/binaries", descriptor), ("/var/lib/k8e", state)):
        Path(target).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", f"/proc/self/fd/{found}", target], check=True, pass_fds=[found])
    overlay(folder, "/etc", "/usr/local")
    socket.sethostname(folder.name)
    enter_groups()
    run("ip", "link", "set", "lo", "up")
    tell("unshared")
    sys.stdin.readline()  # the link is there
    run("ip", "address", "add", address, "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", "default", "via", str(IPv4Interface(address).network[1]))
    tell("up")
    signal.signal(signal.SIGCHLD, collect)
    while True:
        signal.pause()


def collect(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
