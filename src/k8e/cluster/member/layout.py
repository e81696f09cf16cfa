"""Where a member's files lie, which users its programs have, and the addresses of the cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Final, Self

from k8e.cluster.limits import MIB, Limits

# Numbers that no account has: systemd's page of users and groups leaves 1879048192 to 2147352575 unused.
USERS: Final = {
    "etcd": 1_900_000_001,
    "kube-apiserver": 1_900_000_002,
    "kube-controller-manager": 1_900_000_003,
    "kube-scheduler": 1_900_000_004,
}
GROUP: Final = "k8e-cluster"  # the control group of the programs
# Several times what each takes in a cluster of some hundred pods. containerd has none: the shims of all pods are its
# children. The kubelet sets limits of pods.
LIMITS: Final = {
    "etcd": Limits(2048 * MIB),
    "kube-apiserver": Limits(4096 * MIB),
    "kube-controller-manager": Limits(1024 * MIB),
    "kube-scheduler": Limits(1024 * MIB),
    "kubelet": Limits(1024 * MIB),
    "kube-proxy": Limits(512 * MIB),
    "forwarder": Limits(256 * MIB, tasks=64),
}
_PODS: Final = IPv4Network("10.42.0.0/16")
_SERVICES: Final = IPv4Network("10.43.0.0/16")
LOCAL_URL: Final = "https://127.0.0.1:6444"  # where every node finds a server (forwarder.py)
SANDBOXES: Final = "sandbox-matrix"  # the namespace of sandboxes
AUTHORITIES: Final = ("server", "client", "kubelet", "etcd", "front-proxy")


@dataclass(frozen=True, slots=True)
class Layout:
    state: Path = Path("/var/lib/k8e")
    run: Path = Path("/run/k8e")
    kubeconfig: Path = Path("/etc/k8e/k8e.yaml")

    @property
    def server(self) -> Path:
        return self.state / "server"

    @property
    def agent(self) -> Path:
        return self.state / "agent"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def lock(self) -> Path:
        return self.run / "cluster.lock"

    @property
    def is_server(self) -> bool:
        return self.authorities.exists()

    @property
    def kubeconfig_place(self) -> Path:
        """Has the path of the administrator's kubeconfig, for commands that come later."""
        return self.server / "kubeconfig-output"

    @property
    def skills(self) -> Path:
        return self.server / "skills"

    @property
    def helper(self) -> Path:
        """The state of the node's helper."""
        return self.agent / "helper"

    @property
    def node_token(self) -> Path:
        return self.server / "node-token"

    @property
    def server_token(self) -> Path:
        """With which further servers join."""
        return self.server / "server-token"

    @property
    def etcd(self) -> Path:
        return self.server / "etcd"

    @property
    def initial_cluster(self) -> Path:
        """Has the etcd members that a further server was told of when it joined; the first server has no such file."""
        return self.server / "initial-cluster"

    @property
    def backups(self) -> Path:
        return self.server / "backups"

    @property
    def storage(self) -> Path:
        """Has the volumes of pods on this node."""
        return self.state / "storage"

    @property
    def authorities(self) -> Path:
        return self.server / "authorities"

    @property
    def tls(self) -> Path:
        return self.server / "tls"

    @property
    def signing_key(self) -> Path:
        return self.authorities / "service-account.key"

    @property
    def encryption_key(self) -> Path:
        return self.authorities / "encryption.key"

    @property
    def membership(self) -> Path:
        """Has what this machine knows of its cluster; without it, it is no member."""
        return self.agent / "membership.json"

    @property
    def servers(self) -> Path:
        """Has the servers' addresses, those first that are to be tried first."""
        return self.agent / "servers.json"

    @property
    def bootstrap(self) -> Path:
        """A kubeconfig with the token; removed when the kubelet has its certificate."""
        return self.agent / "bootstrap.kubeconfig"

    @property
    def kubelet(self) -> Path:
        return self.agent / "kubelet"

    @property
    def node_certificate(self) -> Path:
        """Written and renewed by the kubelet."""
        return self.kubelet / "pki" / "kubelet-client-current.pem"

    @property
    def containerd(self) -> Path:
        return self.run / "containerd" / "containerd.sock"


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of a cluster, the same on all its machines."""

    pods: IPv4Network = _PODS
    services: IPv4Network = _SERVICES

    @property
    def api(self) -> IPv4Address:
        return self.services[1]

    @property
    def dns(self) -> IPv4Address:
        return self.services[10]


@dataclass(frozen=True, slots=True)
class Membership:
    """Has what a machine learns when it joins. All of it is public."""

    url: str
    node: str
    address: IPv4Address
    networks: Networks
    server_authority: str  # PEM
    client_authority: str  # PEM

    @property
    def body(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "node": self.node,
            "address": str(self.address),
            "pods": str(self.networks.pods),
            "services": str(self.networks.services),
            "server_authority": self.server_authority,
            "client_authority": self.client_authority,
        }

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """KeyError and ValueError when it is damaged."""
        networks = Networks(IPv4Network(body["pods"]), IPv4Network(body["services"]))
        address = IPv4Address(body["address"])
        return cls(body["url"], body["node"], address, networks, body["server_authority"], body["client_authority"])
