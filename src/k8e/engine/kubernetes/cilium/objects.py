"""The objects of Cilium (cilium.io, v2) that the engine makes or reads. Pure.

    CiliumNetworkPolicy    the rules of a list of hosts; and those of all sandboxes, by which nothing is open
    CiliumEndpoint         a pod, as the agent of its node has it: which labels decide on its rules

A pod has the label LIST from the start. It cannot be changed on a pod that was claimed: the controller of its pool puts
back what its template says. So a list that comes later is in NOW, and LIST has no meaning from then on. TURN changes
with NOW: each of its values opens another port, by which the gateway sees that the new labels are in force.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from lightkube.core.resource import ApiInfo, NamespacedResourceG, ResourceDef
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.egress_objects import LIST

GROUP: Final = "cilium.io"
VERSION: Final = "v2"
NOW: Final = "k8e.dev/egress-now"  # label: the list that it was given later
TURN: Final = "k8e.dev/egress-turn"  # label: which of the ports below is open
USED: Final = "k8e.dev/used"  # annotation of a policy: changes when a pod begins to use it

# Ports of a sandbox on which nothing of ours listens: an answer of any kind says that the rules let packets in.
TURN_PORTS: Final = (10542, 10543, 10544, 10545)
CLOSED_PORT: Final = 10546  # no rule opens it


class _Object(msgspec.Struct, omit_defaults=True, rename="camel", kw_only=True):
    api_version: str | None = None
    kind: str | None = None
    metadata: ObjectMeta | None = None


class _Policy(_Object):
    specs: list[dict[str, Any]] | None = None


class CiliumNetworkPolicy(NamespacedResourceG, _Policy):
    _api_info = ApiInfo(ResourceDef(GROUP, VERSION, "CiliumNetworkPolicy"), "ciliumnetworkpolicies", verbs=[])


class Identity(msgspec.Struct):
    labels: list[str] = []


class EndpointStatus(msgspec.Struct):
    identity: Identity | None = None


class _Endpoint(_Object):
    status: EndpointStatus | None = None


class CiliumEndpoint(NamespacedResourceG, _Endpoint):
    _api_info = ApiInfo(ResourceDef(GROUP, VERSION, "CiliumEndpoint"), "ciliumendpoints", verbs=[])


def find_list(pod: Pod) -> str:
    """The digest of the list that the pod's labels name; empty: none."""
    labels = (pod.metadata.labels if pod.metadata is not None else None) or {}
    return str(labels.get(NOW) or labels.get(LIST, ""))


def find_turn(pod: Pod) -> int:
    """-1: its list was never changed."""
    labels = (pod.metadata.labels if pod.metadata is not None else None) or {}
    turn = labels.get(TURN, "")
    return int(turn) if turn.isdecimal() else -1


def belongs_to(endpoint: CiliumEndpoint, uid: str) -> bool:
    """Whether it is of that very pod."""
    owners = (endpoint.metadata.ownerReferences if endpoint.metadata is not None else None) or ()
    return any(owner.uid == uid for owner in owners)


def has_labels(endpoint: CiliumEndpoint, wanted: dict[str, str]) -> bool:
    identity = endpoint.status.identity if endpoint.status is not None else None
    known = set(identity.labels if identity is not None else ())
    return all(f"k8s:{name}={value}" in known for name, value in wanted.items())


def policy_name(gateway: str, digest: str) -> str:
    return f"{names.policy_name(gateway)}-{digest}"
