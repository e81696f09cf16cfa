"""A node of a cluster: containerd with runc and gVisor, the network of its pods, the kubelet, and kube-proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import yaml

from k8e.cluster.api import Api
from k8e.cluster.build import Components
from k8e.cluster.cilium import NETWORK, is_wanted
from k8e.cluster.image import PAUSE
from k8e.cluster.place import Addresses, Place
from k8e.cluster.secrets import Secrets
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Leaf

# The name of each RuntimeClass, and containerd's name for what is behind it.
RUNTIMES: Final = {"native": "runc", "gvisor": "runsc"}
BRIDGE: Final = "pods"
_MAX_PODS: Final = 220  # of the 253 addresses that a node has

_CONTAINERD = """\
version = 3
root = "{root}/containerd"
state = "/run/containerd"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
# A score below containerd's own needs CAP_SYS_RESOURCE, which root does not have on every machine.
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = {plugins}
conf_dir = "{config}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runsc]
runtime_type = "io.containerd.runsc.v1"
"""


class Node:
    def __init__(self, place: Place, addresses: Addresses, components: Components, secrets: Secrets, api: Api) -> None:
        self._place = place
        self._addresses = addresses
        self._components = components
        self._secrets = secrets
        self._api = api

    def containerd(self) -> Program:
        plugins = [self._components.program("bridge").parent]
        cilium = is_wanted(self._components)
        if cilium:
            plugins.append(self._components.program("cilium-cni").parent)
        self._write(
            "containerd.toml",
            _CONTAINERD.format(
                root=self._place.root,
                socket=self._place.containerd,
                pause=PAUSE,
                plugins=json.dumps([str(folder) for folder in plugins]),
                config=self._place.config,
            ),
        )
        network: dict[str, Any] = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": BRIDGE,
                    "isGateway": True,
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni",
                        "ranges": [[{"subnet": str(self._addresses.node_pods)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        self._write("cni/pods.conflist", json.dumps(NETWORK if cilium else network))
        command = [str(self._components.program("containerd")), "--config", str(self._place.config / "containerd.toml")]

        async def is_ready() -> bool:
            return self._place.containerd.is_socket()

        return Program("containerd", command, is_ready)

    def programs(self) -> Iterator[Program]:
        """Those that need the API server."""
        yield self._kubelet()
        yield self._proxy()

    def _kubelet(self) -> Program:
        place, node = self._place, self._place.node
        authority = self._secrets.certificate
        own = self._secrets.issue("kubelet", Leaf(node, hosts=(node, str(self._addresses.node))))
        kubeconfig = place.secrets / "kubelet-client.kubeconfig"
        self._secrets.write_kubeconfig(kubeconfig, self._addresses.api, Leaf(f"system:node:{node}", ("system:nodes",)))
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(own),
            "tlsPrivateKeyFile": str(own),
            "readOnlyPort": 0,
            "containerRuntimeEndpoint": f"unix://{place.containerd}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{place.group}",
            "failCgroupV1": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "maxPods": _MAX_PODS,
            "podLogsDir": str(place.root / "pods"),
            "resolvConf": str(place.config / "resolv.conf"),
            "serializeImagePulls": False,
            # Images are imported by hand and could not be pulled again; the machine's disk is not this cluster's.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        }
        self._write("kubelet.yaml", yaml.safe_dump(config))
        self._write("resolv.conf", "")
        command = [
            str(self._components.program("kubelet")),
            f"--config={place.config / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={place.root / 'kubelet'}",
            f"--cert-dir={place.root / 'kubelet' / 'pki'}",
            f"--hostname-override={node}",
            f"--node-ip={self._addresses.node}",
        ]
        return Program("kubelet", command, self._api.has_condition(f"/api/v1/nodes/{node}", "Ready"))

    def _proxy(self) -> Program:
        kubeconfig = self._place.secrets / "proxy.kubeconfig"
        self._secrets.write_kubeconfig(kubeconfig, self._addresses.api, Leaf("system:kube-proxy"))
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": str(self._addresses.pods),
            "hostnameOverride": self._place.node,
            "bindAddress": str(self._addresses.node),
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            # The size of the connection table is the machine's.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        self._write("proxy.yaml", yaml.safe_dump(config))
        path = self._place.config / "proxy.yaml"
        return Program("kube-proxy", [str(self._components.program("kube-proxy")), f"--config={path}"])

    def _write(self, name: str, content: str) -> None:
        path = self._place.config / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
