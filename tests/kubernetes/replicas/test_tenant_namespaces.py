"""`k8e server --engine kubernetes --tenant-namespaces`: a tenant's sessions are in its namespace, after a kill too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.engine.rig import Site
from tests.kubernetes.engine.test_tenants import list_pods, places
from tests.kubernetes.replicas.test_two_gateways import K8E, Gateway

__all__ = ["places"]


@pytest.fixture
def gateway(site: Site, places: dict[str, str], tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(site, tmp_path / "g")
    start(gateway)
    yield gateway
    gateway.stop()


def start(gateway: Gateway) -> None:
    (gateway.folder / "r/k8e.sock").unlink(missing_ok=True)
    command = [str(K8E), "server", "--engine", "kubernetes", "--tenant-namespaces"]
    with (gateway.folder / "log").open("ab") as log:
        gateway.process = subprocess.Popen(command, env=gateway.env, stderr=log)
    gateway.wait_until_open()


def test_sessions_are_where_their_tenants_are(site: Site, places: dict[str, str], gateway: Gateway) -> None:
    while not gateway.leads:
        assert gateway.process is not None
        assert gateway.process.poll() is None, gateway.read_log()
    keys = {
        name: gateway.ask("sandbox-apikey", "create", name, "--tenant", name)["key"] for name in (*places, "nowhere")
    }
    create = ("sandbox", "create", "--runtime", "native")
    sessions = {tenant: gateway.ask(*create, key=keys[tenant])["session_id"] for tenant in places}
    for namespace in places.values():
        assert len(list_pods(site, namespace)) == 1
    refused = gateway.call(*create, key=keys["nowhere"])
    answer = json.loads(refused.stdout or refused.stderr)
    assert (refused.returncode != 0, "no namespace" in json.dumps(answer), bool(answer["hint"])) == (True, True, True)
    assert list_pods(site, site.kubectl.namespace) == []

    gateway.kill()
    start(gateway)
    for tenant, session in sessions.items():
        run = gateway.ask("sandbox", "run", "--session-id", session, "echo still", key=keys[tenant])
        assert run["stdout"] == "still\n"
        gateway.ask("sandbox", "destroy", session, key=keys[tenant])
    for namespace in places.values():
        assert list_pods(site, namespace) == []
