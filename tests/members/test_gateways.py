"""Three servers with a gateway each: sessions and background commands outlive the server that leads, and its disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.members.commands import Terminal, build_programs
from tests.members.conftest import ROOT, until
from tests.members.machine import Segment, make_segment

NAMESPACE = "sandbox-matrix"
SETTINGS = r"[pool]\nenabled = false\n[kubernetes]\nrequests = 0.1\n"
COUNT = "while :; do echo one >> counted; sleep 0.2; done"


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    folder = ROOT / "build" / "members-gateways"
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as found:
        yield found


@pytest.fixture(scope="module")
def programs() -> Path:
    folder = ROOT / "build" / "members-programs"
    folder.mkdir(parents=True, exist_ok=True)
    return build_programs(folder)


@dataclass
class Cluster:
    servers: dict[str, Terminal]
    worker: Terminal
    server_token: str
    key: str = ""

    def join(self, name: str, through: str) -> None:
        server = self.servers[name]
        server.machine.run("sh", "-c", f"mkdir -p /etc/k8e && printf '{SETTINGS}' > /etc/k8e/k8e.toml")
        url = f"https://{self.servers[through].machine.address}:6443"
        server.start("server", "--cluster", K8E_URL=url, K8E_TOKEN=self.server_token)

    def ask(self, name: str, *words: str) -> Any:
        """A person on the worker asks the gateway of that server."""
        address = f"{self.servers[name].machine.address}:50051"
        return self.worker.ask(*words, K8E_SANDBOX_ENDPOINT=address, K8E_SANDBOX_APIKEY=self.key)

    def find_leader(self, asked: str) -> str:
        return str(self.servers[asked].call("cluster", "status")[1]["gateway"])


def read_token(server: Terminal, name: str) -> str:
    return server.machine.run("cat", f"/var/lib/k8e/server/{name}").stdout.strip()


@pytest.fixture(scope="module")
def cluster(segment: Segment, programs: Path) -> Cluster:
    one = Terminal(segment.make("one"), programs)
    one.machine.run("sh", "-c", f"mkdir /etc/k8e && printf '{SETTINGS}' > /etc/k8e/k8e.toml")
    one.start("server", "--cluster")
    one.wait_ready()
    worker = Terminal(segment.make("w"), programs)
    found = Cluster({"one": one}, worker, read_token(one, "server-token"))
    for name in ("two", "three"):
        found.servers[name] = Terminal(segment.make(name), programs)
        found.join(name, "one")
    url = f"https://{one.machine.address}:6443"
    worker.start("agent", K8E_URL=url, K8E_TOKEN=read_token(one, "node-token"))
    for member in (found.servers["two"], found.servers["three"], worker):
        member.wait_ready()
    # Gateways that do not name a server that joined later are started again.
    until(lambda: all(names_all(server, found) for server in found.servers.values()))
    until(lambda: make_key(found))
    until(lambda: all(serves(found, name) for name in found.servers))
    return found


def names_all(server: Terminal, cluster: Cluster) -> bool:
    """Whether its certificate is good for clients of every server."""
    written = server.machine.run("cat", "/var/lib/k8e/server/gateway.toml").stdout
    return all(f'"{each.machine.address}"' in written for each in cluster.servers.values())


def make_key(cluster: Cluster) -> bool:
    """Only the socket of the server that leads answers."""
    status, answer = lead(cluster).call("sandbox-apikey", "create", "me", "--scope", "operator")
    cluster.key = answer.get("key", "")
    return status == 0


def serves(cluster: Cluster, name: str) -> bool:
    variables = {
        "K8E_SANDBOX_ENDPOINT": f"{cluster.servers[name].machine.address}:50051",
        "K8E_SANDBOX_APIKEY": cluster.key,
    }
    return cluster.worker.call("sandbox", "sessions", **variables)[0] == 0


def lead(cluster: Cluster) -> Terminal:
    """The server that leads."""
    until(lambda: cluster.find_leader("two") != "")
    return cluster.servers[cluster.find_leader("two")]


@contextlib.contextmanager
def only(cluster: Cluster, node: str) -> Iterator[None]:
    """Pods go to this node."""
    two = cluster.servers["two"]
    others = [name for name in (*cluster.servers, "w") if name != node]
    two.kubectl("cordon", *others)
    try:
        yield
    finally:
        two.kubectl("uncordon", *others)


def run(cluster: Cluster, name: str, session: str, code: str, *words: str) -> Any:
    return cluster.ask(name, "sandbox", "run", "--session-id", session, *words, code)


def count(cluster: Cluster, name: str, session: str, run_id: str) -> int:
    """How far the command in the background has come."""
    assert cluster.ask(name, "sandbox", "poll", run_id)["status"] == "running"
    return int(run(cluster, name, session, "cat counted 2>/dev/null | wc -l")["stdout"])


def test_every_server_serves_every_session(cluster: Cluster) -> None:
    session = cluster.ask("one", "sandbox", "create", "--runtime", "native")["session_id"]
    for name in cluster.servers:
        run(cluster, name, session, f"echo of {name} >> note")
    assert run(cluster, "three", session, "cat note")["stdout"] == "of one\nof two\nof three\n"
    cluster.ask("two", "sandbox", "destroy", session)


def test_sessions_and_background_commands_outlive_the_leading_server_and_its_disk(cluster: Cluster) -> None:
    with only(cluster, "w"):
        session = cluster.ask("two", "sandbox", "create", "--runtime", "native")["session_id"]
    run(cluster, "two", session, "echo kept > note")
    started = run(cluster, "two", session, COUNT, "--background", "--timeout", "1h")["run_id"]
    lost = lead(cluster).machine.name
    left = next(name for name in ("three", "two") if name != lost)
    before = count(cluster, left, session, started)

    cluster.servers[lost].machine.cut_power()
    cluster.servers[lost].machine.lose_disk()
    until(lambda: cluster.find_leader(left) not in ("", lost))
    assert run(cluster, left, session, "cat note")["stdout"] == "kept\n"
    until(lambda: count(cluster, left, session, started) > before)
