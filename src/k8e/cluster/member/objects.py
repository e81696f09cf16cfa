"""Objects that every cluster of ours has: rights of nodes and of machines that join, and what all of them may know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from k8e.cluster.member.layout import Networks
from k8e.cluster.trust.join_token import NAMESPACE, WORKERS

SHARED: Final = "k8e-cluster"
SERVER_ROLE: Final = "node-role.kubernetes.io/control-plane"
_NODES: Final = "system:nodes"
_GROUP: Final = "rbac.authorization.k8s.io"


def describe_cluster(networks: Networks, client_authority: str, sandboxes: str = "") -> list[dict[str, Any]]:
    """`sandboxes` is their namespace; empty: the cluster has none."""
    data = {
        "pods": str(networks.pods),
        "services": str(networks.services),
        "client-ca.crt": client_authority,
        "sandboxes": sandboxes,
    }
    role = {"apiGroup": _GROUP, "kind": "Role", "name": SHARED}
    subjects = [_subject("Group", WORKERS), _subject("Group", _NODES)]
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [SHARED], "verbs": ["get"]}
    metadata = {"name": SHARED, "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
        {"apiVersion": f"{_GROUP}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": subjects,
        },
        # A machine that joins may ask for a certificate; a server decides (approval.py).
        _bind("system:node-bootstrapper", [_subject("Group", WORKERS)]),
        # A node renews its own, which the controller-manager approves.
        _bind("system:certificates.k8s.io:certificatesigningrequests:selfnodeclient", [_subject("Group", _NODES)]),
        # kube-proxy uses the node's certificate: it reads services and the addresses behind them.
        _bind("system:node-proxier", [_subject("Group", _NODES)]),
        _bind("system:kubelet-api-admin", [_subject("User", "kube-apiserver")]),
        # A node that leaves removes itself; NodeRestriction keeps it from removing another.
        _allow("k8e:leave", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["delete"]}]),
        _bind("k8e:leave", [_subject("Group", _NODES)]),
    ]


def _allow(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": f"{_GROUP}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}


def _bind(role: str, subjects: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"k8e:{role}"},
        "roleRef": {"apiGroup": _GROUP, "kind": "ClusterRole", "name": role},
        "subjects": list(subjects),
    }


def _subject(kind: str, name: str) -> dict[str, str]:
    return {"apiGroup": _GROUP, "kind": kind, "name": name}
