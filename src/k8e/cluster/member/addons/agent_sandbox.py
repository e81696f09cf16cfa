"""agent-sandbox of a cluster with sandboxes: its kinds, and its controller, which keeps sandboxes warm and hands them
to claims. Pure, but for upstream's files beside the programs.

Upstream's roles let the controller make pods in every namespace, and a pod can be given any Secret of its namespace.
Here it sees the whole cluster, and changes the namespace of sandboxes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from k8e.cluster.addons import serve_one_version
from k8e.cluster.build import Components
from k8e.cluster.components import COMPONENTS
from k8e.cluster.member.addons.pods import NAMESPACE, Addon, allow
from k8e.cluster.member.layout import SANDBOXES

NAME: Final = "agent-sandbox-controller"
SERVED: Final = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{SANDBOXES}/sandboxclaims"
DEPLOYMENT: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}"
_COMPONENT: Final = "agent-sandbox"
_SEEN: Final = frozenset({"get", "list", "watch"})
_RBAC: Final = "rbac.authorization.k8s.io"


def describe_agent_sandbox(components: Components, image: str) -> list[dict[str, Any]]:
    """After the namespace of sandboxes."""
    kinds, rules = [], []
    for found in read_files(components):
        if found["kind"] == "CustomResourceDefinition":
            serve_one_version(found["spec"])
            kinds.append(found)
        else:
            rules += found["rules"]
    seen, changed = divide(rules)
    addon = Addon(
        name=NAME,
        image=image,
        arguments=(
            *("--extensions", "--enable-webhook=false", f"--leader-election-namespace={NAMESPACE}"),
            *("--metrics-bind-address=0", "--health-probe-bind-address=:8081"),
        ),
        rules=seen,
        inside=[
            allow("coordination.k8s.io", ("leases",), ("create", "get", "list", "patch", "update", "watch")),
            allow("", ("events",), ("create", "patch")),
        ],
        memory="512Mi",
        ready={"httpGet": {"path": "/readyz", "port": "health"}},
        ports={"health": ("TCP", 8081)},
        replicas=2,  # of which one leads: claims are answered while the node of the other is lost
    )
    metadata = {"name": NAME, "namespace": SANDBOXES}
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": NAME},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
    }
    role = {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": changed}
    return [*kinds, *addon.describe(), role, binding]


def divide(rules: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns upstream's rules for the whole cluster, where it only reads, and for the namespace of sandboxes. It does
    not change the kinds themselves, which are applied here."""
    inside = [rule for rule in rules if "apiextensions.k8s.io" not in rule["apiGroups"]]
    seen = [{**rule, "verbs": sorted(_SEEN & set(rule["verbs"]))} for rule in inside]
    return [rule for rule in seen if rule["verbs"]], inside


def read_files(components: Components) -> Iterator[dict[str, Any]]:
    component = next(each for each in COMPONENTS if each.name == _COMPONENT)
    for file in component.files:
        yield from yaml.safe_load_all(components.file(_COMPONENT, Path(file).name).read_text())
