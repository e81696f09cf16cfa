"""A daemon with the real engine for each file, found by the SDKs as they find the one of any machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_client import SandboxClient
from tests.cli.machine import Machine, make_folder
from tests.engine.answers import plant_answers

RUNTIME = "native"
ENVIRONMENT = dict(os.environ)  # with this machine's own npm configuration
TYPESCRIPT = Path(__file__).resolve().parent.parent.parent / "sdk" / "typescript"


def npm(*words: str, env: dict[str, str], folder: Path = TYPESCRIPT) -> None:
    done = subprocess.run(
        ["npm", "--loglevel=error", *words],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def built() -> None:
    """The TypeScript package, once for each state of its sources; two workers do not do it at once."""
    sources = ("package.json", "package-lock.json", "tsconfig.json", "src/*", "scripts/*", "../../proto/sandbox/v1/*")
    digest = hashlib.sha256()
    for path in sorted(path for pattern in sources for path in TYPESCRIPT.glob(pattern)):
        digest.update(path.read_bytes())
    (TYPESCRIPT / "build").mkdir(exist_ok=True)
    stamp = TYPESCRIPT / "build" / "stamp"
    with open(TYPESCRIPT / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        # As in a clean checkout, and with a Node that is good enough for every package.
        npm("ci", "--engine-strict", "--no-audit", "--no-fund", env=ENVIRONMENT)
        npm("run", "build", env=ENVIRONMENT)
        stamp.write_text(digest.hexdigest())


@contextlib.contextmanager
def serving() -> Iterator[Machine]:
    with make_folder() as folder:
        machine = Machine(folder, folder / "home")
        plant_answers(folder / "s", machine.home)
        machine.home.mkdir()
        (folder / "k8e.toml").write_text('[pool]\nenabled = false\n[gateway]\nlisten = "127.0.0.1:0"\n')
        machine.overrides["K8E_CONFIG"] = str(folder / "k8e.toml")
        before = dict(os.environ)
        os.environ.update(machine.env)
        try:
            assert machine.k8e("sandbox", "status").json["available"]
            yield machine
            for session in machine.live_sessions():
                machine.k8e("sandbox", "destroy", session)
        finally:
            os.environ.clear()
            os.environ.update(before)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stop(machine.daemon_pid)


def stop(pid: int, number: int = signal.SIGTERM) -> None:
    """Not our child: the kernel says when it is gone."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, number)
        select.select([handle], [], [])
    finally:
        os.close(handle)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def runtime() -> str:
    return RUNTIME


@pytest.fixture(scope="module")
def admin(machine: Machine) -> Iterator[tuple[str, str]]:
    """Where, and a key: somebody else than who asks."""
    made = machine.k8e("sandbox-apikey", "create", "boss", "--scope", "admin").json
    yield made["endpoint"], made["key"]
    machine.k8e("sandbox-apikey", "delete", "boss")


@pytest.fixture(scope="module")
def client(machine: Machine) -> Iterator[SandboxClient]:
    with SandboxClient() as made:
        yield made


@pytest.fixture(scope="module")
def session(client: SandboxClient, runtime: str) -> Iterator[str]:
    made = client.create_session(runtime)
    yield made
    client.destroy_session(made)
