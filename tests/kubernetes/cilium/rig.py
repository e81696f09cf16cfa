"""The agent of Cilium as a process that can be killed and held, and what a sandbox reaches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import yaml

from k8e.cluster.cluster import Cluster
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from tests.kubernetes.engine.rig import ROOT, Site, rename
from tests.kubernetes.kubectl import Kubectl
from tests.kubernetes.node.rig import node_process

# Names or addresses with ports in, words out: whether the page came, or which error. All at the same time.
REACH = """
import concurrent.futures, json, socket, sys
def reach(target):
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 4) as connection:
            connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return "reached" if connection.recv(100) else "closed"
    except OSError as error:
        return type(error).__name__
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    print(json.dumps(list(pool.map(reach, sys.argv[1:]))))
"""


async def reach(engine: KubernetesEngine, name: str, *targets: str) -> list[str]:
    sandbox, place = await engine.attach(name)
    code, output, errors = await run_script(sandbox, place, f"python3 -c '{REACH}' {' '.join(targets)}")
    assert code == 0, errors
    found: list[str] = json.loads(output)
    return found


def allow_policies(kubectl: Kubectl) -> None:
    """Gives the gateway's account the rights of deploy/kubernetes/cilium.yaml in this namespace."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/cilium.yaml").read_text())
    kubectl.apply(*(rename(one, {"k8e": kubectl.namespace}) for one in documents))


def list_policies(site: Site) -> set[str]:
    found = site.kubectl("get", "ciliumnetworkpolicies", "--output=jsonpath={.items[*].metadata.name}")
    return set(found.split())


def find_agent(cluster: Cluster) -> int:
    program = str(cluster.components.program("cilium-agent"))
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path("/proc", entry, "cmdline").read_bytes().split(b"\0")[0].decode() == program and _is_in(
                cluster, int(entry)
            ):
                return int(entry)
    raise AssertionError("no agent of Cilium runs")


def _is_in(cluster: Cluster, pid: int) -> bool:
    """Of this cluster, not of another checkout's."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/proc/{node_process(cluster)}/ns/net").st_ino


@contextlib.contextmanager
def agent_held(cluster: Cluster) -> Iterator[None]:
    """It runs and does nothing."""
    pid = find_agent(cluster)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def set_audit_mode(cluster: Cluster, *, on: bool) -> None:
    """Audit mode lets everything through and notes what it would have dropped; an option of the agent's own API."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(f"/proc/{find_agent(cluster)}/root/run/cilium/cilium.sock")
        body = json.dumps({"options": {"PolicyAuditMode": "Enabled" if on else "Disabled"}})
        head = "PATCH /v1/config HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = connection.recv(4096).decode()
    assert " 200 " in answer.splitlines()[0], answer
