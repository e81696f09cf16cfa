"""The administrator's choices for sandboxes on a cluster, as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from k8e.engine import Runtime

# Whether what a sandbox may reach is controlled. There is no usual answer: an administrator gives one.
POLICY: Final = "policy"  # nothing is reachable, by a NetworkPolicy that the cluster's network applies
NODE: Final = "node"  # what the list says, by a helper on every node (docs/kubernetes-egress.md)
CILIUM: Final = "cilium"  # what the list says, by policies of Cilium, which is the cluster's network
OPEN: Final = "open"  # the engine controls nothing

# The name server of sandboxes under NODE: the same for all pods, each of which has its own node's there.
RESOLVER: Final = "169.254.53.53"

# An empty name is the cluster's usual runtime: a pod without a RuntimeClass.
USUAL_CLASSES: Final[Mapping[Runtime, str]] = MappingProxyType(
    {Runtime.GVISOR: "gvisor", Runtime.NATIVE: "", Runtime.KATA: "kata"}
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    namespace: str
    image: str  # of a sandbox whose session names none
    agent_image: str  # has the agent and its loader
    egress: str  # POLICY, NODE, CILIUM or OPEN
    classes: Mapping[Runtime, str] = field(default_factory=lambda: USUAL_CLASSES)
    images: Sequence[str] = ()  # that sessions may name: see ClusterImages
    claims: bool = True  # sandboxes without a volume are claims on warm pools, where the cluster has agent-sandbox
    storage_class: str = ""  # of the volumes that outlive a pod; empty: there are none
    pull_policy: str = ""  # of both images; empty: Kubernetes' own rule
    requests: float = 1.0  # the part of its limits that a sandbox is sure to get
    user_namespaces: bool = True  # where the cluster can
    life: float = 86_400.0  # seconds after which a pod ends whether or not a gateway runs
    nameservers: Sequence[str] = ()  # of sandboxes under CILIUM; empty: the cluster's own
    deadline: float = 120.0  # seconds for a sandbox to start, its images' pulls included
