"""Cilium as the network of a cluster's pods: its CRDs, its agent on the node, and what containerd is told of it."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from k8e.cluster.api import Api
from k8e.cluster.build import Components
from k8e.cluster.components import CILIUM
from k8e.cluster.control_plane import ADMINS
from k8e.cluster.place import Addresses, Place
from k8e.cluster.secrets import Secrets
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Leaf

NETWORK: Final = {"cniVersion": "1.0.0", "name": "cilium", "plugins": [{"type": "cilium-cni", "log-file": "/dev/null"}]}
_HEALTH_PORT: Final = 9879
# Debian 12's own clang is too old for the programs of Cilium 1.20; this one is installed beside it.
_COMPILER: Final = "/usr/lib/llvm-19/bin"
# Tables of the kernel, of which a few hundred pods fill little.
_TABLES: Final = (
    *("--bpf-ct-global-tcp-max=16384", "--bpf-ct-global-any-max=16384", "--bpf-nat-global-max=32768"),
    *("--bpf-neigh-global-max=16384", "--bpf-auth-map-max=8192", "--bpf-lb-map-max=4096"),
    "--preallocate-bpf-maps=false",
)
_OFF: Final = (
    *("--enable-ipv6=false", "--enable-ipv4-masquerade=false", "--kube-proxy-replacement=false"),
    *("--enable-health-checking=false", "--enable-endpoint-health-checking=false", "--enable-hubble=false"),
    *("--enable-gops=false", "--cni-exclusive=false", "--enable-envoy-config=false"),
)


def is_wanted(components: Components) -> bool:
    return CILIUM.name in components.folders


class Cilium:
    def __init__(self, place: Place, addresses: Addresses, components: Components, secrets: Secrets, api: Api) -> None:
        self._place = place
        self._addresses = addresses
        self._components = components
        self._secrets = secrets
        self._api = api

    def objects(self) -> Iterator[dict[str, Any]]:
        """Its CRDs, which its operator would make one by one."""
        for path in sorted(self._components.file(CILIUM.name, "crds").glob("v2*/*.yaml")):
            yield from yaml.safe_load_all(path.read_text())

    def agent(self) -> Program:
        place = self._place
        kubeconfig = place.secrets / "cilium.kubeconfig"
        self._secrets.write_kubeconfig(kubeconfig, self._addresses.api, Leaf("k8e:cilium", (ADMINS,)))
        program = self._components.program("cilium-agent")
        command = [
            str(program),
            f"--k8s-kubeconfig-path={kubeconfig}",
            "--k8s-namespace=kube-system",
            "--identity-allocation-mode=crd",
            "--ipam=kubernetes",
            "--routing-mode=native",
            f"--ipv4-native-routing-cidr={self._addresses.network}",
            "--enable-host-legacy-routing=true",
            "--devices=eth0",
            "--enable-l7-proxy=true",
            # Names are answered by the agent itself; Envoy is for other protocols.
            *("--external-envoy-proxy=true", "--disable-envoy-version-check=true"),
            f"--cgroup-root={_find_groups()}",
            # Of this cluster's own: what is pinned below /sys would outlive it.
            "--bpf-root=/run/cilium-bpf",
            f"--lib-dir={program.parent}",
            # Of each claim a label of its own would be an identity of its own.
            "--labels=k8s:!agents.x-k8s.io k8s:!extensions.agents.x-k8s.io",
            *_TABLES,
            *_OFF,
        ]
        environment = {"PATH": f"{_COMPILER}:/usr/sbin:/usr/bin:/sbin:/bin", "K8S_NODE_NAME": place.node}
        return Program("cilium-agent", command, _is_healthy, patience=120.0, environment=environment)


def _find_groups() -> str:
    """Where the one hierarchy of cgroup v2 is mounted: also beside those of v1."""
    unified = Path("/sys/fs/cgroup/unified")
    return str(unified if unified.is_dir() else unified.parent)


async def _is_healthy() -> bool:
    return await asyncio.to_thread(_ask_health)


def _ask_health() -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", _HEALTH_PORT, timeout=5)
    try:
        connection.request("GET", "/healthz", headers={"brief": "true"})
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
