"""A machine on which a person types the commands of a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from k8e.cluster.build import default_cache
from k8e.cluster.programs import SANDBOX_IMAGE
from tests.engine.toolbox_image import toolbox_layer
from tests.members.conftest import PATIENCE, until
from tests.members.machine import ENVIRONMENT, Machine, find_child

K8E = str(Path(sys.executable).with_name("k8e"))
PROGRAMS = "/run/programs"
KUBECONFIG = "/etc/k8e/k8e.yaml"


def build_programs(folder: Path) -> Path:
    """`k8e cluster build`, with an image of sandboxes out of this machine's own files."""
    root = folder / "root.tar"
    root.write_bytes(toolbox_layer())
    target = folder / "programs"
    command = [K8E, "cluster", "build", "--output", str(target), "--sandbox-root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / SANDBOX_IMAGE).exists()
    assert default_cache().exists()
    return target


class Terminal:
    def __init__(self, machine: Machine, programs: Path) -> None:
        self.machine = machine
        self._programs = programs
        self._process: subprocess.Popen[str] | None = None
        self.mount_programs()

    def mount_programs(self) -> None:
        """After every boot."""
        self.machine.run("mkdir", "-p", PROGRAMS)
        self.machine.run("mount", "--bind", str(self._programs), PROGRAMS)

    def start(self, *words: str, **environment: str) -> None:
        (self.machine.folder / "command.log").unlink(missing_ok=True)
        self._process = self.machine.start(K8E, *words, "--bin-dir", PROGRAMS, **environment)

    @property
    def said(self) -> str:
        path = self.machine.folder / "command.log"
        return path.read_text() if path.exists() else ""

    def wait_ready(self) -> None:
        process = self._process
        assert process is not None
        until(lambda: "ready after" in self.said or process.poll() is not None, lambda: self.said)
        assert "ready after" in self.said, self.said

    def wait_refused(self) -> dict[str, Any]:
        """Returns the error with which it has ended."""
        assert self._process is not None
        assert self._process.wait(PATIENCE) == 1, self.said
        error: dict[str, Any] = json.loads(self.said.splitlines()[-1])
        return error

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the supervisor a signal, and waits for its end."""
        assert self._process is not None
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(find_child(self._process.pid), number)  # nsenter's
        self._process.wait(PATIENCE)

    def wait_ended(self) -> None:
        assert self._process is not None
        self._process.wait(PATIENCE)

    def call(self, *words: str, **environment: str) -> tuple[int, Any]:
        """Runs a command to its end; returns its exit code and what it has printed."""
        done = subprocess.run(
            [*self.machine.enter(), K8E, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**ENVIRONMENT, "HOME": "/run", **environment},
            timeout=PATIENCE,
        )
        try:
            return done.returncode, json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"{words}: {done.stdout}{done.stderr}") from None

    def ask(self, *words: str, **environment: str) -> Any:
        status, answer = self.call(*words, **environment)
        assert status == 0, (words, answer)
        return answer

    def refuse(self, *words: str, **environment: str) -> str:
        """Returns the code of the error."""
        status, answer = self.call(*words, **environment)
        assert status == 1, (words, answer)
        return str(answer["code"])

    def kubectl(self, *arguments: str) -> str:
        return self.machine.run(f"{PROGRAMS}/kubectl", f"--kubeconfig={KUBECONFIG}", *arguments).stdout
