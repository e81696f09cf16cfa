"""An engine of a test module's own, in a namespace of its own, with the rights of deploy/kubernetes/gateway.yaml and no
more."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from k8e.cluster.cluster import Cluster
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.kubernetes import ClusterOptions, KubernetesEngine
from k8e.engine.kubernetes.names import object_name
from k8e.engine.kubernetes.options import OPEN
from tests.kubernetes.engine.images import AGENT, TOOLS
from tests.kubernetes.kubectl import Kubectl

ROOT = Path(__file__).resolve().parents[3]
CLASSES = {Runtime.GVISOR: "gvisor", Runtime.NATIVE: "native", Runtime.KATA: "kata"}
LIMITS = Limits(cpus=1.0, memory=512 << 20, disk=128 << 20)


def rename(value: Any, names: dict[str, str]) -> Any:
    """In all texts of a document that are one of these names."""
    if isinstance(value, dict):
        return {key: rename(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [rename(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def make_account(kubectl: Kubectl, folder: Path) -> Path:
    """Applies the gateway's manifest in this namespace; returns a kubeconfig of its account."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/gateway.yaml").read_text())
    names = {"k8e": kubectl.namespace}
    objects = [rename(one, names) for one in documents]
    for one in objects:
        if one["kind"].startswith("Cluster"):  # those of other tests have names, too
            one["metadata"]["name"] = f"{kubectl.namespace}-gateway"
        if one["kind"] == "ClusterRoleBinding":
            one["roleRef"]["name"] = f"{kubectl.namespace}-gateway"
    kubectl.apply(*objects)
    return write_kubeconfig(kubectl, "k8e-gateway", folder / "kubeconfig")


def write_kubeconfig(kubectl: Kubectl, account: str, path: Path) -> Path:
    """With a token of that account."""
    config = json.loads(kubectl("config", "view", "--raw", "--output=json"))
    (cluster,) = config["clusters"]
    token = kubectl("create", "token", account, "--duration=2h").strip()
    user = {"name": account, "user": {"token": token}}
    context = {"name": account, "context": {"cluster": cluster["name"], "user": account}}
    if file := cluster["cluster"].pop("certificate-authority", ""):
        cluster["cluster"]["certificate-authority-data"] = base64.b64encode(Path(file).read_bytes()).decode()
    whole = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": account}
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **whole}))
    return path


def remove_account(kubectl: Kubectl) -> None:
    for kind in ("clusterrolebinding", "clusterrole"):
        kubectl("delete", kind, f"{kubectl.namespace}-gateway", "--ignore-not-found")


@dataclass(frozen=True, slots=True)
class Site:
    """A namespace with the gateway's account, and the state directory of a gateway."""

    cluster: Cluster
    kubectl: Kubectl
    kubeconfig: Path
    state: Path
    options: ClusterOptions

    def engine(self, **changes: Any) -> KubernetesEngine:
        from dataclasses import replace

        return KubernetesEngine(replace(self.options, **changes), self.state / "gateway.pem", self.kubeconfig)

    def pod(self, sandbox: str) -> dict[str, Any]:
        return self.kubectl.get(f"pod/{object_name(sandbox)}")

    def kill(self, sandbox: str) -> None:
        """SIGKILL to every process that the pod has."""
        uid = self.pod(sandbox)["metadata"]["uid"]
        for pid in find_processes(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_processes(uid: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and uid in Path("/proc", entry, "cgroup").read_text():
                yield int(entry)


def make_site(cluster: Cluster, kubectl: Kubectl, folder: Path, storage_class: str = "") -> Site:
    options = ClusterOptions(
        kubectl.namespace,
        TOOLS,
        AGENT,
        OPEN,  # nothing in this cluster enforces a NetworkPolicy
        classes=CLASSES,
        storage_class=storage_class,
        pull_policy="Never",
        requests=0.1,
        deadline=60.0,
    )
    return Site(cluster, kubectl, make_account(kubectl, folder), folder, options)


@contextlib.asynccontextmanager
async def open_engine(site: Site, **changes: Any) -> AsyncIterator[KubernetesEngine]:
    engine = site.engine(**changes)
    try:
        yield engine
    finally:
        for name in await engine.list():
            await engine.destroy(name)
        await engine.close()


def spec_of(runtime: Runtime) -> SandboxSpec:
    return SandboxSpec(runtime, limits=LIMITS)


def new_name() -> str:
    return f"t{secrets.token_hex(4)}"


Make = Callable[[], KubernetesEngine]
