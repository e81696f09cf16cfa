"""The objects of the gateways: the namespace of sandboxes, the kind of their records, the Secret with what all
gateways share, and the rights of their account."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from k8e.cluster.member.layout import SANDBOXES
from k8e.cluster.trust.join_token import NAMESPACE

if TYPE_CHECKING:
    from k8e.engine.kubernetes.doctor.rights import Right

USER: Final = "k8e:gateway"
NAME: Final = "k8e-gateway"
# Of the API keys, the CA and the key of agents' channels. No pod of a sandbox can name a Secret of this namespace.
KEY_SECRET: Final = f"{NAMESPACE}/{NAME}"
RECORDS: Final = f"/apis/k8e.dev/v1alpha1/namespaces/{SANDBOXES}/sandboxrecords"
_RBAC: Final = "rbac.authorization.k8s.io"


def describe_sandboxes() -> list[dict[str, Any]]:
    from k8e.engine.kubernetes.doctor.rights import NEEDED, NEEDED_BY_SEVERAL

    rights = (*NEEDED, *NEEDED_BY_SEVERAL)
    shared = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [NAME], "verbs": ["get", "patch"]}
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": SANDBOXES, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        },
        describe_records(),
        # Without content: the first gateway fills it, and what is there stays.
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME, "namespace": NAMESPACE}, "type": "Opaque"},
        *_allow(
            "Role", {"name": NAME, "namespace": SANDBOXES}, _rules(right for right in rights if not right.everywhere)
        ),
        *_allow("Role", {"name": NAME, "namespace": NAMESPACE}, [shared]),
        *_allow("ClusterRole", {"name": NAME}, _rules(right for right in rights if right.everywhere)),
    ]


def describe_records() -> dict[str, Any]:
    """The same as deploy/helm/crds/sandboxrecords.yaml, which is no part of an installation."""
    content = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {
        "type": "object",
        "required": ["name", "term", "content"],
        "properties": {"name": {"type": "string"}, "term": {"type": "integer"}, "content": content},
    }
    columns = [
        {"name": name.capitalize(), "type": "string", "jsonPath": f".spec.content.sessions[0].{path}"}
        for name, path in (("session", "session_id"), ("tenant", "tenant"), ("phase", "phase"), ("runtime", "runtime"))
    ]
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
        "additionalPrinterColumns": [
            *columns,
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        ],
    }
    names = {"kind": "SandboxRecord", "listKind": "SandboxRecordList", "plural": "sandboxrecords"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "sandboxrecords.k8e.dev"},
        "spec": {
            "group": "k8e.dev",
            "scope": "Namespaced",
            "names": {**names, "singular": "sandboxrecord"},
            "versions": [version],
        },
    }


def _rules(rights: Iterable[Right]) -> list[dict[str, Any]]:
    return [{"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]} for right in rights]


def _allow(kind: str, metadata: dict[str, str], rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The role, and that the gateway's account has it."""
    version = f"{_RBAC}/v1"
    return [
        {"apiVersion": version, "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": version,
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": metadata["name"]},
            "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": USER}],
        },
    ]
