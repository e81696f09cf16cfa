"""A daemon with the real engine for each file, found by the SDKs as they find the one of any machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

import pytest

from sandbox_client import SandboxClient
from tests.cli.machine import Machine, make_folder

RUNTIME = "native"


@contextlib.contextmanager
def serving() -> Iterator[Machine]:
    with make_folder() as folder:
        machine = Machine(folder, folder / "home")
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


def stop(pid: int) -> None:
    """Not our child: the kernel says when it is gone."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
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
def client(machine: Machine) -> Iterator[SandboxClient]:
    with SandboxClient() as made:
        yield made


@pytest.fixture(scope="module")
def session(client: SandboxClient, runtime: str) -> Iterator[str]:
    made = client.create_session(runtime)
    yield made
    client.destroy_session(made)
