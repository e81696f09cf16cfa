"""A release of the chart in namespaces of its own, and ways to its gateway."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k8e.cluster.cluster import Cluster
from tests.kubernetes.engine.images import TOOLS
from tests.kubernetes.install.helm import CHART, Helm, merge
from tests.kubernetes.kubectl import Kubectl


@dataclass(frozen=True, slots=True)
class Release:
    cluster: Cluster
    name: str
    kubectl: Kubectl  # in the namespace of the release
    boxes: Kubectl  # in that of sandboxes
    helm: Helm

    @property
    def where(self) -> str:
        return f"--namespace={self.kubectl.namespace}"

    def make_key(self, pod: str, name: str = "me") -> str:
        made = self.kubectl("exec", pod, "--", "k8e", "sandbox-apikey", "create", name, "--tenant", name)
        return str(json.loads(made)["key"])

    def list_pods(self, component: str) -> list[dict[str, Any]]:
        """Those that are not about to end."""
        selector = f"--selector=app.kubernetes.io/component={component},app.kubernetes.io/instance={self.name}"
        found = json.loads(self.kubectl("get", "pods", selector, "--output=json"))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def find_leader(self, *, but: str = "") -> str:
        """The name of the pod that leads; its identity has nine more characters."""
        deadline = time.monotonic() + 90
        while True:
            holders = self.boxes("get", "lease", "--output=jsonpath={.items[*].spec.holderIdentity}").split()
            if holders and (found := holders[0].rpartition("-")[0]) != but:
                return found
            assert time.monotonic() < deadline, "no gateway leads"
            time.sleep(0.2)

    @contextlib.contextmanager
    def forward(self, target: str, port: int = 50051) -> Iterator[int]:
        """A port of this machine that leads to the gateway: its certificate has the name localhost."""
        command = [str(self.cluster.components.program("kubectl")), f"--kubeconfig={self.cluster.place.kubeconfig}"]
        command += [self.where, "port-forward", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                found = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert found is not None, line
                yield int(found[1])
            finally:
                process.terminate()


def describe(namespace: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Values for this cluster, which has no StorageClass and enforces no NetworkPolicy."""
    usual: dict[str, Any] = {
        "sandboxes": {"namespace": namespace, "image": TOOLS, "egress": "open", "requests": 0.1},
        "runtimeClasses": {"native": "native"},
        "state": {"persistent": False},
        "gateway": {"settings": "[pool]\nenabled = false\n"},
    }
    return merge(usual, changes)


@contextlib.contextmanager
def install(cluster: Cluster, kubectl: Kubectl, helm: Helm, changes: dict[str, Any]) -> Iterator[Release]:
    boxes = Kubectl(cluster, f"{kubectl.namespace}-boxes")
    release = Release(cluster, f"r{uuid.uuid4().hex[:6]}", kubectl, boxes, helm)
    values = helm.values(describe(boxes.namespace, changes))
    try:
        helm("install", release.name, str(CHART), release.where, values, "--wait", "--timeout=150s")
        yield release
    finally:
        helm("uninstall", release.name, release.where, "--wait", "--timeout=150s", "--ignore-not-found")
