"""The shortest way through a cluster: from two bare machines to a sandbox on the second, by what a person types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.members.commands import Terminal, build_programs
from tests.members.conftest import ROOT, until
from tests.members.machine import Segment, make_segment

NAMESPACE = "sandbox-matrix"


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    folder = ROOT / "build" / "members-first"
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as found:
        yield found


@pytest.fixture(scope="module")
def programs() -> Path:
    folder = ROOT / "build" / "members-programs"
    folder.mkdir(parents=True, exist_ok=True)
    return build_programs(folder)


@pytest.fixture(scope="module")
def server(segment: Segment, programs: Path) -> Terminal:
    terminal = Terminal(segment.make("one"), programs)
    # Two cores have room for few pods that ask for a whole one.
    settings = r"[kubernetes]\nrequests = 0.1\n"
    terminal.machine.run("sh", "-c", f"mkdir /etc/k8e && printf '{settings}' > /etc/k8e/k8e.toml")
    terminal.start("server", "--cluster")
    terminal.wait_ready()
    return terminal


@pytest.fixture(scope="module")
def worker(segment: Segment, server: Terminal, programs: Path) -> Terminal:
    token = server.machine.run("cat", "/var/lib/k8e/server/node-token").stdout.strip()
    terminal = Terminal(segment.make("two"), programs)
    terminal.start("agent", K8E_URL=f"https://{server.machine.address}:6443", K8E_TOKEN=token)
    terminal.wait_ready()
    return terminal


def read(server: Terminal, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.kubectl("get", kind, f"--namespace={NAMESPACE}", "--output=json"))[
        "items"
    ]
    return found


def test_a_sandbox_runs_on_the_worker(server: Terminal, worker: Terminal) -> None:
    server.kubectl("cordon", "one")
    session = server.ask("sandbox", "create", "--runtime", "native")["session_id"]
    done = server.ask("sandbox", "run", "--session-id", session, "echo $((6 * 7))")
    assert (done["exit_code"], done["stdout"]) == (0, "42\n")
    (claim,) = read(server, "sandboxclaims")
    pods = {pod["metadata"]["name"]: pod for pod in read(server, "pods")}
    bound = pods[claim["status"]["sandbox"]["name"]]
    assert bound["spec"]["nodeName"] == "two"
    server.ask("sandbox", "destroy", session)
    server.kubectl("uncordon", "one")


def test_sandboxes_are_kept_warm_by_agent_sandbox(server: Terminal, worker: Terminal) -> None:
    """After the second session of a kind there is one ready for the next."""
    server.ask("sandbox", "destroy", server.ask("sandbox", "create", "--runtime", "native")["session_id"])

    def is_warm() -> bool:
        pools = read(server, "sandboxwarmpools")
        return any((pool.get("status") or {}).get("readyReplicas", 0) >= 1 for pool in pools)

    until(is_warm, lambda: server.kubectl("get", "sandboxwarmpools,pods", f"--namespace={NAMESPACE}"))
