"""Installing packages, for real: from the registries that this machine's pip and npm are configured for, through the
command line and the daemon, on both runtimes. Scenarios 2 and 4 of the first seed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from k8e.engine.local.toolchain.package_clients import ask_clients
from k8e.engine.local.toolchain.registries import find_registries
from tests.cli.machine import Machine, make_folder, wait_until
from tests.runtimes import do_without
from tests.sandboxes import needs_root

pytestmark = needs_root

PYTHON_PACKAGE = "iniconfig"  # small, and alone
NODE_PACKAGE = "is-number"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With a daemon that the first command starts, with the engine that users have."""
    with make_folder() as folder:
        home = folder / "home"
        home.mkdir()
        machine = Machine(folder, home)
        yield machine
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)
        daemon = machine.daemon_pid
        os.kill(daemon, signal.SIGTERM)
        wait_until(lambda: not os.path.exists(f"/proc/{daemon}"))


@pytest.fixture(scope="module")
def index(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Host of the Python index, which this machine itself must reach: without that there is nothing to show."""
    answers = asyncio.run(ask_clients(tmp_path_factory.mktemp("tools"), None, machine.env))
    url = urlsplit(answers.pip.get("index-url", answers.pip_index))
    host = url.hostname or ""
    try:
        socket.create_connection((host, url.port or 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"this machine does not reach its own package index: {error}")
    return host


@pytest.fixture(scope="module", params=["gvisor", "native"])
def session(request: pytest.FixtureRequest, machine: Machine, index: str) -> str:
    """With the default list."""
    done = machine.k8e("sandbox", "create", "--runtime", request.param)
    if done.code != 0:
        do_without(request.param, done.stdout)
    return str(done.json["session_id"])


def run(machine: Machine, session: str, *words: str) -> dict[str, Any]:
    done = machine.run("--session-id", session, "--timeout", "55", *words)
    return dict(json.loads(done.stdout))


def test_pip_installs_and_python_imports(machine: Machine, session: str) -> None:
    installed = run(machine, session, f"pip install --no-deps {PYTHON_PACKAGE}")
    assert installed["exit_code"] == 0, installed
    assert f"Successfully installed {PYTHON_PACKAGE}-" in installed["stdout"]
    imported = run(machine, session, f"python3 -c 'import {PYTHON_PACKAGE}; print({PYTHON_PACKAGE}.__file__)'")
    assert imported["stdout"].startswith("/home/user/.venv/"), imported
    assert installed["denied"] == imported["denied"] == []


def test_npm_installs_and_node_requires(machine: Machine, session: str) -> None:
    installed = run(machine, session, f"npm install {NODE_PACKAGE}")
    assert installed["exit_code"] == 0, installed
    used = run(machine, session, "--lang", "node", f"console.log(require('{NODE_PACKAGE}')('5'))")
    assert used["stdout"] == "true\n", used
    assert installed["denied"] == []


def test_tools_trust_what_the_machine_trusts(machine: Machine, session: str, index: str) -> None:
    """Not only pip and npm: curl, Python's ssl, Node's fetch."""
    url = f"https://{index}/"
    python = f"import urllib.request as r; r.urlopen(r.Request('{url}', method='HEAD'), timeout=30)"
    for words in (
        [f"curl -sS -o /dev/null {url}"],
        ["--lang", "python", python],
        ["--lang", "node", f"fetch('{url}', {{method: 'HEAD'}}).then(() => {{}})"],
    ):
        done = run(machine, session, *words)
        assert done["exit_code"] == 0, done


def test_no_credential_of_the_machine_is_inside(machine: Machine, session: str) -> None:
    files = dict(asyncio.run(find_registries(environ=machine.env)).files)
    for path in ("/etc/pip.conf", "/etc/npmrc"):
        done = machine.k8e("sandbox", "read", session, path, "--raw")
        assert done.stdout == files[path]


@pytest.mark.parametrize("runtime", ["gvisor", "native"])
def test_a_list_of_ones_own(machine: Machine, index: str, runtime: str) -> None:
    """Scenario 4: what is named works, what the default had does not, and the result says what was refused."""
    created = machine.k8e("sandbox", "create", "--runtime", runtime, "--allowed-hosts", f"{index},api.example.com")
    if created.code != 0:
        do_without(runtime, created.stdout)
    session = created.json["session_id"]
    works = run(machine, session, f"curl -sS -o /dev/null -w '%{{http_code}}' https://{index}/")
    assert works["exit_code"] == 0, works
    assert works["denied"] == []
    refused = run(machine, session, "curl -sS https://github.com/")
    assert refused["exit_code"] == 6, refused  # curl: could not resolve host
    (denied,) = refused["denied"]
    assert denied["host"] == "github.com"
    assert denied["reason"] == "name_not_listed"
    assert denied["hint"]
    assert machine.k8e("sandbox", "destroy", session).json["ok"] is True


@pytest.mark.parametrize("runtime", ["gvisor", "native"])
def test_pip_on_an_empty_list_fails_at_once_and_is_explained(machine: Machine, index: str, runtime: str) -> None:
    created = machine.k8e("sandbox", "create", "--runtime", runtime, "--allowed-hosts", "")
    if created.code != 0:
        do_without(runtime, created.stdout)
    session = created.json["session_id"]
    done = run(machine, session, f"pip install --retries 0 --no-deps {PYTHON_PACKAGE}")
    assert done["exit_code"] == 1, done
    assert index in {each["host"] for each in done["denied"]}
    raw = machine.run("--session-id", session, "--raw", f"curl -sS https://{index}/")
    assert index in raw.stderr.decode()
    assert machine.k8e("sandbox", "destroy", session).json["ok"] is True
