"""From nothing to sandboxes on two workers, and back to nothing, by the commands that people type."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.members.commands import Terminal, build_programs
from tests.members.conftest import ROOT, until
from tests.members.machine import Segment, make_segment

NAMESPACE = "sandbox-matrix"
# The administrator's settings, beside the cluster's own: every pod is a session's, and a machine has room for many.
SETTINGS = r"[pool]\nenabled = false\n[kubernetes]\nrequests = 0.1\n"


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    folder = ROOT / "build" / "members-commands"
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
    terminal.machine.run("sh", "-c", f"mkdir /etc/k8e && printf '{SETTINGS}' > /etc/k8e/k8e.toml")
    terminal.start("server", "--cluster")
    terminal.wait_ready()
    return terminal


@dataclass(frozen=True, slots=True)
class Way:
    """What a worker is told."""

    url: str
    token: str

    @property
    def variables(self) -> dict[str, str]:
        return {"K8E_URL": self.url, "K8E_TOKEN": self.token}


@pytest.fixture(scope="module")
def way(server: Terminal) -> Way:
    token = server.machine.run("cat", "/var/lib/k8e/server/node-token").stdout.strip()
    return Way(f"https://{server.machine.address}:6443", token)


@pytest.fixture(scope="module")
def workers(segment: Segment, server: Terminal, programs: Path, way: Way) -> list[Terminal]:
    found = [Terminal(segment.make(name), programs) for name in ("two", "three")]
    for worker in found:
        worker.start("agent", **way.variables)
    for worker in found:
        worker.wait_ready()
    return found


@contextlib.contextmanager
def only(server: Terminal, node: str) -> Iterator[None]:
    """Pods go to this node."""
    found = server.kubectl("get", "nodes", "--output=name").split()
    others = [name.removeprefix("node/") for name in found if name != f"node/{node}"]
    server.kubectl("cordon", *others)
    try:
        yield
    finally:
        server.kubectl("uncordon", *others)


def list_places(server: Terminal) -> dict[str, str]:
    """The node of each pod of a sandbox."""
    pods = json.loads(server.kubectl("get", "pods", f"--namespace={NAMESPACE}", "--output=json"))["items"]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}


def make_session(server: Terminal, node: str, *words: str) -> str:
    """Returns its id; its pod is on that node."""
    before = list_places(server)
    with only(server, node):
        session = str(server.ask("sandbox", "create", *words)["session_id"])
    made = {name: place for name, place in list_places(server).items() if name not in before}
    assert list(made.values()) == [node], (made, before)
    return session


def run(terminal: Terminal, session: str, code: str, *words: str, **environment: str) -> Any:
    """Returns the result, whatever the exit code."""
    return terminal.call("sandbox", "run", "--session-id", session, *words, code, **environment)[1]


def test_the_first_server_has_what_its_page_says(server: Terminal) -> None:
    assert [line.split()[0] for line in server.kubectl("get", "nodes", "--no-headers").splitlines()] == ["one"]
    classes = server.kubectl("get", "runtimeclasses", "--no-headers")
    assert {"native", "gvisor"} <= {line.split()[0] for line in classes.splitlines()}
    paths = ("/etc/k8e/k8e.yaml", "/var/lib/k8e/server/node-token")
    assert server.machine.run("stat", "-c", "%a %u", *paths).stdout.split("\n")[:2] == ["600 0", "600 0"]
    skills = server.machine.run("ls", "/var/lib/k8e/server/skills/k8e-sandbox-skill").stdout.split()
    assert "SKILL.md" in skills
    found = server.ask("cluster", "status")
    assert (found["ok"], found["role"], [node["role"] for node in found["nodes"]]) == (True, "server", ["server"])
    assert {"etcd", "kube-apiserver", "kubelet", "gateway", "node-helper"} <= {
        each["program"] for each in found["programs"]
    }


def test_a_sandbox_runs_on_each_worker(server: Terminal, workers: list[Terminal]) -> None:
    nodes = {node["node"]: node for node in server.ask("cluster", "status")["nodes"]}
    assert {name: (node["role"], node["ready"]) for name, node in nodes.items()} == {
        "one": ("server", True),
        "two": ("worker", True),
        "three": ("worker", True),
    }
    for node, runtime in (("two", "gvisor"), ("three", "native")):
        session = make_session(server, node, "--runtime", runtime)
        done = run(server, session, "import os; print(6 * 7, os.uname().release)", "--lang", "python")
        assert (done["exit_code"], done["stdout"].split()[0]) == (0, "42"), done
        assert ("gvisor" in done["stdout"]) == (runtime == "gvisor")
        server.ask("sandbox", "destroy", session)


def test_a_worker_s_own_status_says_where_it_belongs(workers: list[Terminal], way: Way) -> None:
    found = workers[0].ask("cluster", "status")
    assert (found["role"], found["node"], found["url"], len(found["nodes"])) == ("worker", "two", way.url, 3)
    assert workers[0].refuse("cluster", "token", "list") == "not_a_server"


CONNECT = "import socket; socket.create_connection(('{}', {}), 5); print('reached')"


def test_a_sandbox_reaches_what_its_list_says_and_nothing_else(
    server: Terminal, workers: list[Terminal], way: Way
) -> None:
    """The gateway's own port on the server is what one of two sandboxes may reach, from another node."""
    host = server.machine.address
    closed = make_session(server, "two", "--runtime", "native")
    opened = make_session(server, "two", "--runtime", "native", "--allowed-hosts", f"{host}:50051")
    refused = run(server, closed, CONNECT.format(host, 50051), "--lang", "python")
    assert refused["exit_code"] != 0
    assert refused["denied"], refused
    assert run(server, opened, CONNECT.format(host, 50051), "--lang", "python")["stdout"] == "reached\n"
    assert run(server, opened, CONNECT.format(host, 6443), "--lang", "python")["exit_code"] != 0
    for session in (closed, opened):
        server.ask("sandbox", "destroy", session)


def test_the_gateway_serves_other_machines(server: Terminal, workers: list[Terminal]) -> None:
    key = server.ask("sandbox-apikey", "create", "me", "--scope", "operator")["key"]
    variables = {"K8E_SANDBOX_ENDPOINT": f"{server.machine.address}:50051", "K8E_SANDBOX_APIKEY": key}
    with only(server, "three"):
        session = workers[0].ask("sandbox", "create", "--runtime", "native", **variables)["session_id"]
    assert run(workers[0], session, "echo from afar", **variables)["stdout"] == "from afar\n"
    workers[0].ask("sandbox", "destroy", session, **variables)


@pytest.fixture(scope="module")
def other(segment: Segment, workers: list[Terminal], programs: Path) -> Terminal:
    """A machine with nothing on it."""
    return Terminal(segment.make("four"), programs)


class TestTokens:
    def test_are_made_listed_and_deleted(self, server: Terminal, way: Way) -> None:
        made = server.ask("cluster", "token", "create", "--description", "of a test")
        assert made["token"][:70] == way.token[:70]
        found = {each["id"]: each for each in server.ask("cluster", "token", "list")["tokens"]}
        assert (found[made["id"]]["description"], found[made["id"]]["over"]) == ("of a test", False)
        assert made["token"][77:] not in json.dumps(found)
        server.ask("cluster", "token", "delete", made["id"])
        assert made["id"] not in {each["id"] for each in server.ask("cluster", "token", "list")["tokens"]}
        assert server.refuse("cluster", "token", "delete", made["id"]) == "token_not_found"

    def test_that_are_wrong_join_nothing(self, other: Terminal, way: Way) -> None:
        wrong = way.token[:-16] + "0" * 16
        other.start("agent", K8E_URL=way.url, K8E_TOKEN=wrong)
        error = other.wait_refused()
        assert error["code"] == "join_refused"
        assert wrong[-16:] not in json.dumps(error)

    def test_of_another_cluster_are_not_even_sent(self, other: Terminal, way: Way) -> None:
        other.start("agent", K8E_URL=way.url, K8E_TOKEN=way.token.replace(way.token[4:68], "ab" * 32))
        assert other.wait_refused()["code"] == "wrong_cluster"

    def test_that_are_no_tokens_are_refused_here(self, other: Terminal, way: Way) -> None:
        other.start("agent", K8E_URL=way.url, K8E_TOKEN="secret")
        assert other.wait_refused()["code"] == "bad_join_token"

    def test_that_are_over_join_nothing(self, other: Terminal, server: Terminal, way: Way) -> None:
        made = server.ask("cluster", "token", "create", "--ttl", "1s")

        def is_over() -> bool:
            found = {each["id"]: each["over"] for each in server.ask("cluster", "token", "list")["tokens"]}
            return bool(found.get(made["id"], True))

        until(is_over)
        other.start("agent", K8E_URL=way.url, K8E_TOKEN=made["token"])
        assert other.wait_refused()["code"] == "join_refused"

    def test_leave_nothing_on_a_machine_that_may_not_join(self, other: Terminal) -> None:
        assert not (other.machine.folder / "state" / "agent" / "membership.json").exists()
        assert other.refuse("cluster", "status") == "no_cluster"


def test_sessions_outlive_a_supervisor_that_is_killed(server: Terminal, workers: list[Terminal]) -> None:
    session = make_session(server, "two", "--runtime", "native")
    run(server, session, "echo kept > note")
    before = server.ask("cluster", "status")["programs"]
    server.end(signal.SIGKILL)
    assert server.call("cluster", "status")[1]["supervisor"] is None
    server.start("server", "--cluster")
    server.wait_ready()
    assert server.ask("cluster", "status")["programs"] == before
    assert run(server, session, "cat note")["stdout"] == "kept\n"
    server.ask("sandbox", "destroy", session)


def test_a_runtime_that_was_installed_is_found_at_the_next_start(server: Terminal, workers: list[Terminal]) -> None:
    """Also: a worker that is stopped and started keeps its sandboxes."""
    worker = workers[0]
    session = make_session(server, "two", "--runtime", "native")
    run(server, session, "echo kept > note")
    assert "kata" not in server.kubectl("get", "runtimeclasses", "--output=name")
    worker.end()
    # No sandbox is made with it here: what counts is that it is found, and announced.
    worker.machine.run("cp", "/bin/true", "/usr/local/bin/containerd-shim-kata-v2")
    if not Path("/dev/kvm").exists():
        pytest.skip("there is no /dev/kvm, without which kata is not looked for")
    worker.start("agent")  # it knows its cluster by now
    worker.wait_ready()
    config = worker.machine.run("cat", "/var/lib/k8e/agent/etc/containerd/config.toml").stdout
    assert 'runtime_type = "io.containerd.kata.v2"' in config
    until(lambda: "runtimeclass.node.k8s.io/kata" in server.kubectl("get", "runtimeclasses", "--output=name"))
    assert server.ask("cluster", "status")["nodes"][-1]["runtimes"] == ["gvisor", "kata", "native"]
    assert run(server, session, "cat note")["stdout"] == "kept\n"
    server.ask("sandbox", "destroy", session)


def list_left(terminal: Terminal) -> list[str]:
    """What a member could leave on a machine."""
    command = terminal.machine.run
    found = [line for line in command("ip", "link").stdout.splitlines() if "k8e" in line or "veth" in line]
    found += command("ip", "route", "show", "proto", "107").stdout.splitlines()
    found += command("nft", "list", "tables").stdout.splitlines()
    found += [line for line in command("ip", "rule").stdout.splitlines() if "lookup" in line and "k8e" in line]
    mounts = [line.split()[1] for line in command("cat", "/proc/mounts").stdout.splitlines()]
    found += [each for each in mounts if "kubelet" in each or each.startswith(("/run/k8e", "/run/netns/"))]
    processes = command("sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done").stdout
    words = ("shim", "kube", "etcd", "containerd", "k8e server", "k8e agent", "node-helper", "k8e-agent")
    found += [line for line in processes.splitlines() if any(word in line for word in words)]
    return found


def test_a_worker_leaves_and_nothing_is_left(server: Terminal, workers: list[Terminal]) -> None:
    leaving = workers[1]
    session = make_session(server, "three", "--runtime", "native")
    assert leaving.refuse("cluster", "leave", "--yes") == "sandboxes_live"
    assert leaving.refuse("cluster", "leave", "--with-sandboxes") == "not_confirmed"
    assert leaving.ask("cluster", "leave", "--yes", "--with-sandboxes")["left"] == []
    leaving.wait_ended()
    assert [node["node"] for node in server.ask("cluster", "status")["nodes"]] == ["one", "two"]
    assert leaving.machine.run("ls", "-A", "/var/lib/k8e").stdout.split() == []
    # The kernel removes interfaces a moment after their namespace.
    until(lambda: list_left(leaving) == [], lambda: list_left(leaving))
    server.call("sandbox", "destroy", session)


def test_a_server_does_not_leave(server: Terminal) -> None:
    assert server.refuse("cluster", "leave", "--yes", "--with-sandboxes") == "is_a_server"


def test_a_server_is_uninstalled_and_nothing_is_left(server: Terminal, workers: list[Terminal]) -> None:
    make_session(server, "one", "--runtime", "native")
    assert server.refuse("cluster", "uninstall", "--yes") == "sandboxes_live"
    server.ask("cluster", "uninstall", "--yes", "--with-sandboxes")
    server.wait_ended()
    until(lambda: list_left(server) == [], lambda: list_left(server))
    assert server.machine.run("ls", "-A", "/var/lib/k8e").stdout.split() == []
    assert server.machine.run("ls", "-A", "/etc/k8e").stdout.split() == ["k8e.toml"]  # the administrator's own


def test_a_machine_with_sandboxes_of_its_own_becomes_no_server(server: Terminal) -> None:
    server.machine.run("touch", "/var/lib/k8e/k8e.db")
    server.start("server", "--cluster")
    assert server.wait_refused()["code"] == "machine_in_use"
    assert server.refuse("cluster", "status") == "no_cluster"
    server.machine.run("rm", "-r", "/var/lib/k8e/k8e.db", "/var/lib/k8e/logs")


def test_a_cluster_without_sandboxes_and_a_kubeconfig_elsewhere(server: Terminal) -> None:
    """On the machine that was a server of another cluster before."""
    server.start("server", "--cluster", "--disable-sandbox-matrix", K8E_KUBECONFIG_OUTPUT="/run/admin.yaml")
    server.wait_ready()
    found = server.ask("cluster", "status")
    assert {"gateway", "node-helper"}.isdisjoint({each["program"] for each in found["programs"]})
    assert server.machine.run("stat", "-c", "%a", "/run/admin.yaml").stdout == "600\n"
    assert server.machine.run("ls", "-A", "/etc/k8e").stdout.split() == ["k8e.toml"]
    command = ["/run/programs/kubectl", "--kubeconfig=/run/admin.yaml", "get"]
    assert NAMESPACE not in server.machine.run(*command, "namespaces", "--output=name").stdout
    assert "runtimeclass.node.k8s.io/gvisor" in server.machine.run(*command, "runtimeclasses", "--output=name").stdout
    server.ask("cluster", "uninstall", "--yes")
    server.wait_ended()
    assert server.machine.run("ls", "/run/admin.yaml", check=False).returncode != 0
    until(lambda: list_left(server) == [], lambda: list_left(server))
