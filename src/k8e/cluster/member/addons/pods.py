"""The shape that all add-ons have in common: an account with its rights, and a deployment of one container, which runs
as a user without rights and has limits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

NAMESPACE: Final = "kube-system"
_RBAC: Final = "rbac.authorization.k8s.io"
_NOBODY: Final = 65534


@dataclass(frozen=True, slots=True)
class Addon:
    name: str
    image: str
    arguments: Sequence[str]
    rules: Sequence[dict[str, Any]]  # what its account may do in the whole cluster
    memory: str  # the limit
    ready: dict[str, Any] | None = None  # the probe
    inside: Sequence[dict[str, Any]] = ()  # what its account may do in its own namespace
    ports: dict[str, tuple[str, int]] = field(default_factory=dict)  # by name: TCP or UDP, and the number
    replicas: int = 1
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)  # volumes, by the path in the container
    environment: Sequence[dict[str, Any]] = ()

    def describe(self) -> list[dict[str, Any]]:
        metadata = {"name": self.name, "namespace": NAMESPACE}
        account = {"kind": "ServiceAccount", "name": self.name, "namespace": NAMESPACE}
        role = f"k8e:addon:{self.name}"
        return [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": role},
                "rules": list(self.rules),
            },
            _bind("ClusterRoleBinding", {"name": role}, "ClusterRole", role, account),
            {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": list(self.inside)},
            _bind("RoleBinding", metadata, "Role", self.name, account),
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": self._describe_deployment()},
        ]

    def _describe_deployment(self) -> dict[str, Any]:
        labels = {"k8e.dev/addon": self.name}
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
        pod = {
            "serviceAccountName": self.name,
            "priorityClassName": "system-cluster-critical",
            # A node that is gone is not waited for as long as for other pods.
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{key}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 30,
                }
                for key in ("not-ready", "unreachable")
            ],
            "topologySpreadConstraints": [spread],
            "dnsPolicy": "Default",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _NOBODY,
                "runAsGroup": _NOBODY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._describe_container()],
            "volumes": [{"name": f"folder-{number}", **volume} for number, volume in enumerate(self.folders.values())],
        }
        return {
            "replicas": self.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }

    def _describe_container(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image": self.image,
            "imagePullPolicy": "Never",
            "command": [f"/{self.name}"],
            "args": list(self.arguments),
            "env": list(self.environment),
            "ports": [
                {"name": name, "protocol": protocol, "containerPort": number}
                for name, (protocol, number) in self.ports.items()
            ],
            **({"readinessProbe": {**self.ready, "periodSeconds": 5}} if self.ready is not None else {}),
            "resources": {"requests": {"cpu": "20m", "memory": "32Mi"}, "limits": {"memory": self.memory}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": f"folder-{number}", "mountPath": path} for number, path in enumerate(self.folders)
            ],
        }


def allow(group: str, resources: Sequence[str], verbs: Sequence[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _bind(kind: str, metadata: dict[str, str], role_kind: str, role: str, account: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": role_kind, "name": role},
        "subjects": [account],
    }
