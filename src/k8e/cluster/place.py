"""The folder of one cluster: where each file lies, and the names on the machine that are made from it.

Everything that a cluster writes is below its folder, and everything else that it needs a name for (the link to the
machine, control groups) carries the tag of the folder. So clusters of several checkouts do not meet, and what a killed
one has left can be found.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Place:
    root: Path  # absolute

    @property
    def tag(self) -> str:
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def node(self) -> str:
        return f"node-{self.tag}"

    @property
    def link(self) -> str:
        """The machine's end of the link to the cluster. Not "k8e-...", which is a wire of the local engine."""
        return f"kcl-{self.tag}"

    @property
    def group(self) -> str:
        """The control group below which all pods are, in every hierarchy."""
        return f"kcl-{self.tag}"

    @property
    def mark(self) -> Path:
        """Made first, so that no folder of another purpose is taken for a cluster's, which stop removes."""
        return self.root / ".k8e-cluster"

    @property
    def record(self) -> Path:
        return self.root / "cluster.json"

    @property
    def lock(self) -> Path:
        """Locked by a command that starts or stops the cluster. Beside the folder, which such a command removes."""
        return self.root.with_name(f".{self.root.name}.lock")

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def secrets(self) -> Path:
        """Private keys, and kubeconfigs that have one."""
        return self.root / "secrets"

    @property
    def config(self) -> Path:
        return self.root / "config"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The networks of a cluster, all inside one, so that one route of the machine leads to it."""

    network: IPv4Network  # a /16

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError when the text is not a /16."""
        network = IPv4Network(text)
        if network.prefixlen != 16:
            raise ValueError(f"{text} is not a /16")
        return cls(network)

    @property
    def nodes(self) -> IPv4Network:
        return self._part(0, 24)

    @property
    def services(self) -> IPv4Network:
        return self._part(64, 18)

    @property
    def pods(self) -> IPv4Network:
        return self._part(128, 17)

    @property
    def node_pods(self) -> IPv4Network:
        """Those of the first node."""
        return self._part(128, 24)

    @property
    def machine(self) -> IPv4Address:
        return self.nodes[1]

    @property
    def node(self) -> IPv4Address:
        return self.nodes[2]

    @property
    def api(self) -> str:
        return f"https://{self.node}:6443"

    def _part(self, third: int, prefix: int) -> IPv4Network:
        return IPv4Network((int(self.network.network_address) + (third << 8), prefix))
