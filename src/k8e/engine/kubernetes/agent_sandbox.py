"""The objects of agent-sandbox (agent-sandbox.sigs.k8s.io, v1beta1) that the engine makes: a template and a warm pool
for each kind of sandbox, a claim for each sandbox. Pure.

    SandboxTemplate    the pod of a kind
    SandboxWarmPool    how many of that kind the cluster has ready
    SandboxClaim       takes one of them, or has one made when none is ready; ends at its time, gateway or not
"""

from __future__ import annotations

import datetime
import hashlib
from typing import Final

import msgspec
from lightkube.core.resource import ApiInfo, NamespacedResourceG, ResourceDef
from lightkube.models.core_v1 import PodSpec
from lightkube.models.meta_v1 import Condition, ObjectMeta
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes import names

GROUP: Final = "extensions.agents.x-k8s.io"
VERSION: Final = "v1beta1"
WARM: Final = "agents.x-k8s.io/warm-pool-sandbox"  # label of a pod that no claim has
_ASSIGNED: Final = "agents.x-k8s.io/sandbox-name"  # annotation of a claim: the pod that the controller means to give it
_FINISHED: Final = 3600  # seconds for which a claim whose pod has ended stays, so that its gateway can say why
_API: Final = f"{GROUP}/{VERSION}"


def _describe(kind: str, plural: str) -> ApiInfo:
    return ApiInfo(ResourceDef(GROUP, VERSION, kind), plural, verbs=[])


class _Part(msgspec.Struct, omit_defaults=True, rename="camel"):
    """As in JSON, but for the spelling of names."""


class _Object(_Part, kw_only=True):
    api_version: str | None = None
    kind: str | None = None
    metadata: ObjectMeta | None = None


class PodMetadata(_Part):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class PodTemplate(_Part):
    metadata: PodMetadata
    spec: PodSpec


class TemplateSpec(_Part):
    pod_template: PodTemplate
    network_policy_management: str = ""
    service: bool | None = None


class _Template(_Object):
    spec: TemplateSpec | None = None


class SandboxTemplate(NamespacedResourceG, _Template):
    _api_info = _describe("SandboxTemplate", "sandboxtemplates")


class Reference(_Part):
    name: str


class PoolSpec(_Part):
    sandbox_template_ref: Reference
    replicas: int | None = None


class PoolStatus(_Part):
    ready_replicas: int = 0
    observed_generation: int = 0


class _Pool(_Object):
    spec: PoolSpec | None = None
    status: PoolStatus | None = None


class SandboxWarmPool(NamespacedResourceG, _Pool):
    _api_info = _describe("SandboxWarmPool", "sandboxwarmpools")


class Lifecycle(_Part):
    shutdown_time: str | None = None
    shutdown_policy: str | None = None
    ttl_seconds_after_finished: int | None = None


class ClaimSpec(_Part):
    warm_pool_ref: Reference
    lifecycle: Lifecycle | None = None


class ClaimedSandbox(_Part):
    name: str = ""


class ClaimStatus(_Part):
    sandbox: ClaimedSandbox | None = None
    conditions: list[Condition] | None = None


class _Claim(_Object):
    spec: ClaimSpec | None = None
    status: ClaimStatus | None = None


class SandboxClaim(NamespacedResourceG, _Claim):
    _api_info = _describe("SandboxClaim", "sandboxclaims")


def name_kind(pod: Pod, gateway: str) -> str:
    """Names the template and the pool of such pods by all that the pod is made of: whatever cannot be changed on a pod
    that runs is in it."""
    assert pod.metadata is not None
    assert pod.spec is not None
    content = msgspec.json.encode((pod.metadata.labels, pod.metadata.annotations, pod.spec), order="sorted")
    return names.pool_name(gateway, hashlib.sha256(content).hexdigest())


def build_template(name: str, pod: Pod, gateway: str) -> SandboxTemplate:
    """`Unmanaged`: the policy that the controller would make opens the internet, and policies add up."""
    assert pod.metadata is not None
    assert pod.spec is not None
    labels = {**(pod.metadata.labels or {}), names.POOL: name}
    return SandboxTemplate(
        api_version=_API,
        kind="SandboxTemplate",
        metadata=ObjectMeta(name=name, labels=dict(names.labels(gateway))),
        spec=TemplateSpec(
            PodTemplate(PodMetadata(labels, pod.metadata.annotations), pod.spec), "Unmanaged", service=False
        ),
    )


def build_pool(name: str, gateway: str, replicas: int) -> SandboxWarmPool:
    return SandboxWarmPool(
        api_version=_API,
        kind="SandboxWarmPool",
        metadata=ObjectMeta(name=name, labels=dict(names.labels(gateway))),
        spec=PoolSpec(Reference(name), replicas),
    )


def build_sandbox_claim(sandbox: str, pool: str, gateway: str, until: float) -> SandboxClaim:
    """It is deleted at its time together with all that it has, and is there until that is gone."""
    return SandboxClaim(
        api_version=_API,
        kind="SandboxClaim",
        metadata=ObjectMeta(
            name=names.object_name(sandbox),
            labels=dict(names.labels(gateway)),
            annotations={names.SANDBOX: sandbox},
        ),
        spec=ClaimSpec(Reference(pool), Lifecycle(format_time(until), "DeleteForeground", _FINISHED)),
    )


def format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_pod_name(claim: SandboxClaim) -> str:
    """The pod that the claim has for certain; empty: none yet. An adopted one keeps the name that its pool gave it."""
    found = claim.status.sandbox if claim.status is not None else None
    return found.name if found is not None else ""


def find_assigned_name(claim: SandboxClaim) -> str:
    """The pod that the claim will have, unless that changes; named before its state does. Empty: none yet."""
    return (claim.metadata.annotations or {}).get(_ASSIGNED, "") if claim.metadata is not None else ""


def read_condition(claim: SandboxClaim) -> Condition | None:
    conditions = (claim.status.conditions or ()) if claim.status is not None else ()
    return next((one for one in conditions if one.type == "Ready"), None)
