"""One server and one worker for the tests of a file, each on a machine that the tests have made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.cluster.build import default_cache, find_components
from tests.kubernetes.kubectl import make_busybox
from tests.members.machine import Machine, Segment, find_child, make_segment

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0


class Member:
    """A machine with a member on it."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine, self.kind = machine, kind
        self._process: subprocess.Popen[str] | None = None

    def start(self, name: str = "", **environment: str) -> None:
        (self.machine.folder / "command.log").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.members.command", self.kind]
        command += [name or self.machine.name, self.machine.address]
        self._process = self.machine.start(*command, **environment)

    @property
    def said(self) -> str:
        path = self.machine.folder / "command.log"
        return path.read_text() if path.exists() else ""

    def wait_ready(self) -> None:
        assert self._process is not None
        until(lambda: "ready after" in self.said or self._process.poll() is not None, self.said)  # type: ignore[union-attr]
        assert "ready after" in self.said, self.said

    def wait_refused(self) -> dict[str, Any]:
        """Returns the error with which it has ended."""
        assert self._process is not None
        assert self._process.wait(PATIENCE) == 1, self.said
        error: dict[str, Any] = json.loads(self.said.splitlines()[-1])
        return error

    def kubectl_command(self, *arguments: str) -> list[str]:
        found = find_components(default_cache())
        assert found is not None
        program = Path("/run/binaries") / found.program("kubectl").relative_to(default_cache())
        return [str(program), "--kubeconfig=/var/lib/k8e/k8e.yaml", *arguments]

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> str:
        done = self.machine.run(*self.kubectl_command(*arguments), given=given, check=check)
        return done.stdout + ("" if check else done.stderr)

    def import_busybox(self) -> None:
        found = find_components(default_cache())
        assert found is not None
        program = Path("/run/binaries") / found.program("ctr").relative_to(default_cache())
        command = [str(program), "--address=/run/k8e/containerd/containerd.sock", "--namespace=k8s.io"]
        subprocess.run(
            [*self.machine.enter(), *command, "images", "import", "-"],
            input=make_busybox(),
            check=True,
            capture_output=True,
        )

    def run_python(self, script: str, *arguments: str) -> str:
        return self.machine.run(sys.executable, "-c", script, *arguments).stdout

    def list_processes(self) -> dict[str, int]:
        """Returns the pids of its programs, as the machine sees them."""
        script = "import json, pathlib; from k8e.cluster.child import list_programs"
        script += "; print(json.dumps(list_programs(pathlib.Path('/var/lib/k8e/logs'))))"
        found: dict[str, int] = json.loads(self.run_python(script))
        return found

    def kill(self) -> None:
        """kill -9 of the supervisor."""
        assert self._process is not None
        os.kill(find_child(self._process.pid), signal.SIGKILL)  # nsenter's
        self._process.wait()


def until(condition: Callable[[], bool], told: object = "") -> None:
    """`told` is for the error; a function is called then."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, told() if callable(told) else told
        time.sleep(0.1)


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    folder = ROOT / "build" / "members" / str(os.getpid())  # two files of tests may run at once
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as found:
        yield found
    folder.rmdir()


@pytest.fixture(scope="module")
def server(segment: Segment) -> Member:
    member = Member(segment.make("one"), "server")
    member.start()
    member.wait_ready()
    member.import_busybox()
    return member


@pytest.fixture(scope="module")
def token(server: Member) -> str:
    return server.machine.run("cat", "/var/lib/k8e/server/node-token").stdout.strip()


@pytest.fixture(scope="module")
def url(server: Member) -> str:
    return f"https://{server.machine.address}:6443"


@pytest.fixture(scope="module")
def worker(segment: Segment, server: Member, url: str, token: str) -> Member:
    member = Member(segment.make("two"), "worker")
    member.start(K8E_URL=url, K8E_TOKEN=token)
    member.wait_ready()
    member.import_busybox()
    return member
