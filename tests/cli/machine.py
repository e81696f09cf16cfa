"""A machine as a user of the command line sees it: a home, a daemon, and `k8e` on the path."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
K8E = Path(sys.executable).with_name("k8e")
DEADLINE = 60.0


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def json(self) -> Any:
        """The one object that it printed."""
        assert self.stdout.count(b"\n") == 1, self.stdout
        assert self.stderr == b"", self.stderr
        return json.loads(self.stdout)


@dataclass
class Machine:
    folder: Path
    home: Path
    overrides: dict[str, str] = field(default_factory=dict)
    deadline: float = field(default=DEADLINE, kw_only=True)  # of each command

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{K8E.parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "K8E_RUN_DIR": str(self.folder / "r"),
            "K8E_STATE_DIR": str(self.folder / "s"),
            "K8E_CONFIG": str(self.folder / "k8e.toml"),
            **self.overrides,
        }

    def k8e(self, *words: str | bytes, stdin: bytes | None = b"", env: Mapping[str, str] | None = None) -> Done:
        done = subprocess.run(
            [K8E, *words],
            input=stdin,
            capture_output=True,
            env={**self.env, **(env or {})},
            timeout=self.deadline,
            cwd=self.home,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def run(self, *words: str | bytes, **settings: Any) -> Done:
        return self.k8e("sandbox", "run", *words, **settings)

    def shell(self, script: str) -> Done:
        """As a user would type it."""
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, env=self.env, timeout=self.deadline, cwd=self.home, input=b""
        )
        return Done(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def start(self, *words: str, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A command line that is still at work; not when this ends."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen([K8E, *words], env=self.env, cwd=self.home, **{**pipes, **settings}) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def state(self, tenant: str = "default") -> Path:
        return self.home / ".k8e" / "sandbox" / tenant / "state.json"

    def session(self, tenant: str = "default") -> str:
        return str(json.loads(self.state(tenant).read_text())["session_id"])

    def running(self, session: str) -> list[str]:
        """The commands that run in a session."""
        answer = self.k8e("sandbox", "ps", session).json
        return [process["command"] for process in answer["processes"]]

    def live_sessions(self) -> list[str]:
        answer = self.k8e("sandbox", "sessions").json
        return [session["session_id"] for session in answer.get("sessions", ())]

    @property
    def daemon_pid(self) -> int:
        return int((self.folder / "r" / "k8e.lock").read_text())


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another process does, some time soon."""
    import time

    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@contextlib.contextmanager
def make_folder() -> Iterator[Path]:
    """Short, because sockets lie in it, and a place that others can walk through."""
    folder = Path(tempfile.mkdtemp(prefix="k8e-", dir="/tmp"))
    folder.chmod(0o755)
    settings = folder / "k8e.toml"
    # Nothing is made ahead: tests look at what is there.
    settings.write_text("[pool]\nenabled = false\n")
    settings.chmod(0o644)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def run_launcher(machine: Machine, descriptors: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon with the test engine, from listening to a clean end. With so many descriptors and no more."""
    bounded = () if descriptors is None else ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
    ours, theirs = os.pipe()
    with open(machine.folder / "log", "ab") as log:
        daemon = subprocess.Popen(
            [*bounded, sys.executable, "-m", "tests.cli.launcher", str(theirs)],
            cwd=ROOT,
            env={**os.environ, **machine.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    with os.fdopen(ours, "rb") as ready:
        assert ready.read() == b"ready\n", (machine.folder / "log").read_text()
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(DEADLINE)
        log_text = (machine.folder / "log").read_text()
        assert code == 0, log_text
        assert "Traceback" not in log_text, log_text


AnyMachine = TypeVar("AnyMachine", bound=Machine)


@contextlib.contextmanager
def share(kind: type[AnyMachine]) -> Iterator[AnyMachine]:
    """One daemon, with the test engine, for many tests: what is tested is the way to it and back."""
    if os.geteuid() != 0:
        pytest.skip("namespaces without a user namespace need root")
    with make_folder() as folder:
        machine = kind(folder, folder)
        with run_launcher(machine):
            try:
                yield machine
            finally:
                for session in machine.live_sessions():
                    machine.k8e("sandbox", "destroy", session)
