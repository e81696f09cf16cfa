"""Somebody at a shell. What they type is what the documents say, with `jq` where the machine may have none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import Cgroups
from tests.cli.machine import ROOT, Done, Machine, wait_until

# `jq -r .key` for machines that have none.
PRELUDE = r"""
set -u
get() { python3 -c 'import json, sys; value = json.load(sys.stdin)[sys.argv[1]]; print(value, end="")' "$1"; }
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_without_gvisor(machine: Machine) -> None:
    """Returns when it listens. It is nobody's child, as one that the command line starts."""
    ours, theirs = os.pipe()
    starter = 'exec "$0" -m tests.scenarios.launcher "$1" </dev/null >>"$2" 2>&1 &'
    subprocess.run(
        ["setsid", "sh", "-c", starter, sys.executable, str(theirs), str(machine.folder / "log")],
        cwd=ROOT,
        env={**os.environ, **machine.env},
        pass_fds=(theirs,),
        stdin=subprocess.DEVNULL,
        check=True,
    )
    os.close(theirs)
    with os.fdopen(ours, "rb") as ready:
        assert ready.read() == b"ready\n", (machine.folder / "log").read_text()


def stop_daemon(machine: Machine, number: int = signal.SIGTERM) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = machine.daemon_pid
        os.kill(pid, number)
        wait_until(lambda: not is_alive(pid))


def clear_machine(machine: Machine) -> None:
    """With whatever daemon can be had, so that no sandbox stays behind a test that failed."""
    if (machine.folder / "r").is_dir():
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)
        stop_daemon(machine)
        Cgroups(Layout(machine.folder / "s", machine.folder / "r").cgroup).remove_all()


@dataclass
class User(Machine):
    runtime: str = ""

    def types(self, script: str, stdin: bytes = b"") -> Done:
        done = subprocess.run(
            ["bash", "-c", PRELUDE + script],
            capture_output=True,
            env=self.env,
            timeout=120,
            cwd=self.home,
            input=stdin,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def lines(self, script: str, stdin: bytes = b"") -> list[str]:
        """What a script prints that nobody complains about."""
        done = self.types(script, stdin)
        assert (done.code, done.stderr) == (0, b""), done
        return done.stdout.decode().splitlines()

    def kill_the_daemon(self) -> None:
        stop_daemon(self, signal.SIGKILL)

    def bring_the_daemon_back(self) -> None:
        """By itself with the next command; a machine without runsc needs our own launcher."""
        if self.runtime == "native" and not is_alive(self.daemon_pid):
            start_without_gvisor(self)

    @contextlib.contextmanager
    def daemon_killed(self) -> Iterator[None]:
        self.kill_the_daemon()
        self.bring_the_daemon_back()
        yield
