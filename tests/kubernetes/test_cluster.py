"""The cluster that `make cluster` starts can do what sandboxes on Kubernetes need."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

import pytest

from k8e.cluster.cluster import Cluster
from k8e.cluster.node import RUNTIMES
from tests.kubernetes.kubectl import Kubectl, describe_pod, make_pod

SERVE = "echo hello from $HOSTNAME > /files/index.html; exec httpd -f -p 8000 -h /files"


def is_true(found: dict[str, Any], condition: str) -> bool:
    return any(each["type"] == condition and each["status"] == "True" for each in found["status"]["conditions"])


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}:8000/", timeout=30) as answer:
        content: bytes = answer.read()
    return content.decode()


def test_the_node_is_ready_and_has_the_pinned_versions(cluster: Cluster, kubectl: Kubectl) -> None:
    node = kubectl.get(f"node/{cluster.place.node}")
    assert is_true(node, "Ready")
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"
    assert node["status"]["nodeInfo"]["containerRuntimeVersion"] == "containerd://2.4.2"
    assert node["spec"]["podCIDR"] == str(cluster.addresses.node_pods)


def test_the_node_watches_its_disk_and_memory(cluster: Cluster, kubectl: Kubectl) -> None:
    """Evictions depend on it; the kubelet goes on without, and only logs that it cannot."""
    summary = json.loads(kubectl("get", "--raw", f"/api/v1/nodes/{cluster.place.node}/proxy/stats/summary"))
    assert summary["node"]["fs"]["availableBytes"] > 0
    assert summary["node"]["runtime"]["imageFs"]["availableBytes"] > 0
    assert summary["node"]["memory"]["availableBytes"] > 0


@pytest.mark.parametrize(("runtime", "kernel"), [("native", "linux"), ("gvisor", "gvisor")])
def test_a_pod_runs_and_answers(kubectl: Kubectl, runtime: str, kernel: str) -> None:
    kubectl.apply(make_pod("server", runtime, SERVE))
    kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=120s")
    assert fetch(kubectl.get("pod/server")["status"]["podIP"]) == "hello from server\n"
    release = kubectl("exec", "server", "--", "busybox", "uname", "-r")
    assert ("gvisor" in release) == (kernel == "gvisor")
    assert kubectl("exec", "server", "--", "cat", "/files/index.html") == "hello from server\n"


def test_a_service_leads_to_its_pod(kubectl: Kubectl) -> None:
    """From another pod, and from the machine."""
    server = make_pod("server", "native", SERVE)
    server["metadata"]["labels"] = {"app": "server"}
    ports = {"selector": {"app": "server"}, "ports": [{"port": 8000}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "server"}, "spec": ports}
    kubectl.apply(server, service, make_pod("client", "native", "exec sleep 1000"))
    kubectl("wait", "--for=condition=Ready", "pod/server", "pod/client", "--timeout=120s")
    address = kubectl.get("service/server")["spec"]["clusterIP"]
    ask = f"until echo 'GET / HTTP/1.0\n' | nc -w 5 {address} 8000; do sleep 0.1; done"
    assert kubectl("exec", "client", "--", "sh", "-c", ask).endswith("\nhello from server\n")
    assert fetch(address) == "hello from server\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_claim_on_a_warm_pool_gets_one_of_its_sandboxes(kubectl: Kubectl, runtime: str) -> None:
    group = "extensions.agents.x-k8s.io/v1beta1"
    template = {"networkPolicyManagement": "Unmanaged", "podTemplate": {"spec": describe_pod(runtime, SERVE)}}
    pool = {"replicas": 1, "sandboxTemplateRef": {"name": "base"}}
    kubectl.apply({"apiVersion": group, "kind": "SandboxTemplate", "metadata": {"name": "base"}, "spec": template})
    kubectl.apply({"apiVersion": group, "kind": "SandboxWarmPool", "metadata": {"name": "warm"}, "spec": pool})
    kubectl("wait", "--for=jsonpath={.status.readyReplicas}=1", "sandboxwarmpool/warm", "--timeout=120s")
    warm = kubectl("get", "sandboxes", "--output=jsonpath={.items[*].metadata.name}").split()
    claim = {"warmPoolRef": {"name": "warm"}}
    kubectl.apply({"apiVersion": group, "kind": "SandboxClaim", "metadata": {"name": "mine"}, "spec": claim})
    kubectl("wait", "--for=condition=Ready", "sandboxclaim/mine", "--timeout=120s")
    sandbox = kubectl.get("sandboxclaim/mine")["status"]["sandbox"]
    assert [sandbox["name"]] == warm
    assert fetch(sandbox["podIPs"][0]) == f"hello from {sandbox['name']}\n"


def test_who_has_no_certificate_is_refused(cluster: Cluster) -> None:
    """By the API server and by the kubelet."""
    context = ssl.create_default_context(cafile=str(cluster.place.secrets / "ca.crt"))
    for address in (f"{cluster.addresses.api}/api/v1/nodes", f"https://{cluster.addresses.node}:10250/pods"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, timeout=30, context=context)
        caught.value.close()
        assert caught.value.code == 401, address


def test_a_node_reads_no_secret_that_no_pod_of_it_uses(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl("create", "secret", "generic", "private", "--from-literal=a=b")
    node = Kubectl(cluster, kubectl.namespace, cluster.place.secrets / "kubelet-client.kubeconfig")
    assert node.get(f"node/{cluster.place.node}")["kind"] == "Node"
    assert "no relationship found between node" in node.refused("get", "secret/private")
