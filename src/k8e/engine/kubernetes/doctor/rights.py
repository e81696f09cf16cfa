"""The rights that the gateway's account needs, as a table: the doctor asks the cluster for each, and the roles of
deploy/ are the same (a test compares them). And those that it should not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

from k8e.engine.kubernetes.api import Api


@dataclass(frozen=True, slots=True)
class Right:
    verb: str
    resource: str
    group: str = ""
    everywhere: bool = False  # of the whole cluster, not of the namespace of sandboxes

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


def _each(verbs: str, resource: str, group: str = "", *, everywhere: bool = False) -> tuple[Right, ...]:
    return tuple(Right(verb, resource, group, everywhere) for verb in verbs.split())


NEEDED: Final = (
    *_each("create delete get list patch watch", "pods"),
    *_each("create delete get list patch watch", "persistentvolumeclaims"),
    *_each("list", "events"),
    *_each("create get", "networkpolicies", "networking.k8s.io"),
    # Where the cluster has agent-sandbox. Without it these name nothing.
    *_each("create delete get list patch watch", "sandboxclaims", "extensions.agents.x-k8s.io"),
    *_each("create delete get list patch watch", "sandboxwarmpools", "extensions.agents.x-k8s.io"),
    *_each("create delete get list", "sandboxtemplates", "extensions.agents.x-k8s.io"),
    *_each("list", "runtimeclasses", "node.k8s.io", everywhere=True),
    *_each("list", "nodes", everywhere=True),
)

# Of one of several gateways, on top.
NEEDED_BY_SEVERAL: Final = (
    *_each("create delete get list update", "sandboxrecords", "k8e.dev"),
    *_each("create get list update watch", "leases", "coordination.k8s.io"),
    *_each("create delete get update", "secrets"),  # variables of persistent sessions
)

# Under egress = cilium, on top.
NEEDED_WITH_CILIUM: Final = (
    *_each("create delete get list patch update", "ciliumnetworkpolicies", "cilium.io"),
    *_each("list watch", "ciliumendpoints", "cilium.io"),
)

# With each of these a gateway that was taken over could leave its namespace.
TOO_MANY: Final = (
    *_each("create", "pods", everywhere=True),
    *_each("list", "secrets", everywhere=True),
    *_each("create", "clusterrolebindings", "rbac.authorization.k8s.io", everywhere=True),
    *_each("impersonate", "users", everywhere=True),
    *_each("patch", "nodes", everywhere=True),
)


async def has_right(api: Api, right: Right) -> bool:
    """Asks the API server whether the account that asks has this right."""
    attributes = ResourceAttributes(
        verb=right.verb,
        resource=right.resource,
        group=right.group,
        namespace="" if right.everywhere else api.namespace,
    )
    review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=attributes))
    answer = await api.create_global(review)
    return answer.status is not None and answer.status.allowed
