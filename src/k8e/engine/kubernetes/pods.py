"""Builds the pod and the volume of a sandbox. Pure.

A pod keeps the rules of the "restricted" Pod Security Standard: no root, no capability, no privilege to gain, the
runtime's seccomp filter. So the agent is the user that commands run as; what a sandbox is told it can read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightkube.models.core_v1 import (
    Capabilities,
    Container,
    ContainerPort,
    EmptyDirVolumeSource,
    EnvVar,
    EnvVarSource,
    ObjectFieldSelector,
    PersistentVolumeClaimSpec,
    PersistentVolumeClaimVolumeSource,
    PodDNSConfig,
    PodDNSConfigOption,
    PodReadinessGate,
    PodSecurityContext,
    PodSpec,
    ResourceRequirements,
    SeccompProfile,
    SecurityContext,
    Toleration,
    Volume,
    VolumeMount,
    VolumeResourceRequirements,
)
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import PersistentVolumeClaim, Pod

from k8e.engine import Limits, SandboxSpec
from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.egress_objects import FIRST, IN_FORCE, LIST, WANTED, Wanted, digest_list
from k8e.engine.kubernetes.options import CILIUM, NODE, POLICY, RESOLVER, ClusterOptions
from k8e.engine.kubernetes.place import HOME, PROGRAMS, USER_ID, WORKSPACE

CONTAINER: Final = "sandbox"
INSTALLER: Final = "agent"
AGENT: Final = "k8e-agent-pod"
_FILES, _RUN, _PROGRAMS = "files", "run", "agent"
_GRACE: Final = 1  # seconds between TERM and KILL: the agent ends at once
_LOST_NODE: Final = 30  # seconds until a pod whose node does not answer is given up
_PROGRAMS_SIZE: Final = 1 << 20
_SMALL: Final = 50, 32 << 20  # thousandths of a CPU, bytes of memory
_NO_NAMESERVER: Final = "127.0.0.1"  # no names: a resolver carries data out of a sandbox that reaches nothing else


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The parts from which the pod of a sandbox is built, besides the sandbox's spec."""

    sandbox: str  # empty: of a warm pool, without a name, and without an end until it is claimed
    gateway: str  # its label
    gateway_key: str  # its public key, in hexadecimal
    agent_arguments: Sequence[str]
    runtime_class: str  # empty: the cluster's usual runtime
    image: str
    user_namespace: bool = False  # the cluster can give it one of its own
    claim: str = ""  # the volume that is its workspace; empty: it ends with the pod
    node: str = ""  # where it must run: its volume is used there


def build_pod(spec: SandboxSpec, plan: PodPlan, options: ClusterOptions) -> Pod:
    annotations = {names.RUNTIME: spec.runtime.value}
    if plan.sandbox:
        annotations[names.SANDBOX] = plan.sandbox
    if options.egress == NODE:
        annotations[names.GATEWAY_KEY] = plan.gateway_key
        if plan.sandbox:
            annotations[WANTED] = Wanted(FIRST, spec.egress).text()
    labels = dict(names.labels(plan.gateway))
    if options.egress == CILIUM:
        labels[LIST] = digest_list(spec.egress)
    dns_policy, dns = _choose_dns(options)
    for volume in (_RUN,):  # gVisor: in the memory of its own kernel
        hint = f"dev.gvisor.spec.mount.{volume}"
        annotations |= {f"{hint}.type": "tmpfs", f"{hint}.share": "container", f"{hint}.options": "rw,nosuid,nodev"}
    return Pod(
        metadata=ObjectMeta(
            name=names.object_name(plan.sandbox) if plan.sandbox else None,
            namespace=options.namespace if plan.sandbox else None,
            labels=labels,
            annotations=annotations,
        ),
        spec=PodSpec(
            restartPolicy="Never",  # a command is run once
            automountServiceAccountToken=False,
            enableServiceLinks=False,
            hostUsers=False if plan.user_namespace else None,
            hostname=spec.hostname,
            runtimeClassName=plan.runtime_class or None,
            activeDeadlineSeconds=math.ceil(options.life) if plan.sandbox else None,
            terminationGracePeriodSeconds=_GRACE,
            nodeName=plan.node or None,
            tolerations=[
                Toleration(key=key, operator="Exists", effect="NoExecute", tolerationSeconds=_LOST_NODE)
                for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
            ],
            dnsPolicy=dns_policy,
            dnsConfig=dns,
            readinessGates=[PodReadinessGate(conditionType=IN_FORCE)] if options.egress == NODE else None,
            securityContext=PodSecurityContext(
                runAsNonRoot=True,
                runAsUser=USER_ID,
                runAsGroup=USER_ID,
                # A volume's directory is root's until it is given away, at the price of a set-group-id bit there. An
                # emptyDir is open to all in its pod.
                fsGroup=USER_ID if plan.claim else None,
                seccompProfile=SeccompProfile(type="RuntimeDefault"),
            ),
            initContainers=[_build_installer(spec, options)],
            containers=[_build_container(spec, plan, options)],
            volumes=_list_volumes(spec.limits, plan),
        ),
    )


def _choose_dns(options: ClusterOptions) -> tuple[str, PodDNSConfig | None]:
    """Names are complete names: those that search domains would add are on no list, and their refusal ends a search."""
    servers = {POLICY: (_NO_NAMESERVER,), NODE: (RESOLVER,), CILIUM: options.nameservers}.get(options.egress, ())
    if servers:
        return "None", PodDNSConfig(nameservers=list(servers))
    if options.egress == CILIUM:
        return "ClusterFirst", PodDNSConfig(options=[PodDNSConfigOption(name="ndots", value="1")])
    return "Default", None


def _build_installer(spec: SandboxSpec, options: ClusterOptions) -> Container:
    """Copies the agent out of its image, so that any other image can be a sandbox's. It requests no more than the
    sandbox: a pod is counted for its life with the larger request of the two."""
    milli, memory = _SMALL
    least = (
        max(1, min(milli, round(spec.limits.cpus * options.requests * 1000))),
        min(memory, round(spec.limits.memory * options.requests)),
    )
    most, requested = ({"cpu": f"{cpu}m", "memory": str(size)} for cpu, size in (_SMALL, least))
    return Container(
        name=INSTALLER,
        image=options.agent_image,
        imagePullPolicy=options.pull_policy or None,
        command=[f"/{AGENT}", "--install", PROGRAMS],
        securityContext=_restrict(read_only=True),
        resources=ResourceRequirements(limits=most, requests=requested),
        volumeMounts=[VolumeMount(name=_PROGRAMS, mountPath=PROGRAMS)],
    )


def _build_container(spec: SandboxSpec, plan: PodPlan, options: ClusterOptions) -> Container:
    return Container(
        name=CONTAINER,
        image=plan.image,
        imagePullPolicy=options.pull_policy or None,
        command=[f"{PROGRAMS}/{AGENT}"],
        args=list(plan.agent_arguments),
        workingDir="/",
        env=[_refer("K8E_POD_IP", "status.podIP"), _refer("K8E_POD_UID", "metadata.uid")],
        ports=[ContainerPort(name="agent", containerPort=_find_port(plan.agent_arguments), protocol="TCP")],
        securityContext=_restrict(read_only=spec.shape.read_only),
        resources=_limit(spec.limits, options.requests),
        volumeMounts=[
            VolumeMount(name=_PROGRAMS, mountPath=PROGRAMS, readOnly=True),
            VolumeMount(name=_RUN, mountPath="/run"),
            VolumeMount(name="tmp", mountPath="/tmp"),
            VolumeMount(name="home", mountPath=HOME, readOnly=spec.shape.read_only or None),
            VolumeMount(name=_FILES, mountPath=WORKSPACE, readOnly=spec.shape.read_only or None),
        ],
    )


def _refer(name: str, path: str) -> EnvVar:
    return EnvVar(name=name, valueFrom=EnvVarSource(fieldRef=ObjectFieldSelector(fieldPath=path)))


def _find_port(arguments: Sequence[str]) -> int:
    return int(arguments[list(arguments).index("--port") + 1])


def _restrict(*, read_only: bool) -> SecurityContext:
    return SecurityContext(
        allowPrivilegeEscalation=False,
        capabilities=Capabilities(drop=["ALL"]),
        readOnlyRootFilesystem=read_only,
    )


def _limit(limits: Limits, part: float) -> ResourceRequirements:
    """The writable layer, the logs and the volumes that end with the pod count as its ephemeral storage."""
    milli = max(1, round(limits.cpus * 1000))
    most = {"cpu": f"{milli}m", "memory": str(limits.memory), "ephemeral-storage": str(limits.disk)}
    least = {
        "cpu": f"{max(1, round(milli * part))}m",
        "memory": str(round(limits.memory * part)),
        "ephemeral-storage": str(round(limits.disk * part)),
    }
    return ResourceRequirements(limits=most, requests=least)


def _list_volumes(limits: Limits, plan: PodPlan) -> list[Volume]:
    disk = str(limits.disk)
    if plan.claim:
        workspace = Volume(name=_FILES, persistentVolumeClaim=PersistentVolumeClaimVolumeSource(claimName=plan.claim))
    else:
        workspace = Volume(name=_FILES, emptyDir=EmptyDirVolumeSource(sizeLimit=disk))
    memory = str(max(limits.memory // 4, 1 << 20))
    return [
        Volume(name=_PROGRAMS, emptyDir=EmptyDirVolumeSource(sizeLimit=str(_PROGRAMS_SIZE))),
        Volume(name=_RUN, emptyDir=EmptyDirVolumeSource(medium="Memory", sizeLimit=memory)),
        Volume(name="tmp", emptyDir=EmptyDirVolumeSource(sizeLimit=disk)),
        Volume(name="home", emptyDir=EmptyDirVolumeSource(sizeLimit=disk)),
        workspace,
    ]


def build_claim(sandbox: str, gateway: str, limits: Limits, options: ClusterOptions) -> PersistentVolumeClaim:
    """The volume of a sandbox that can be stopped."""
    return PersistentVolumeClaim(
        metadata=ObjectMeta(
            name=names.object_name(sandbox),
            namespace=options.namespace,
            labels=dict(names.labels(gateway)),
            annotations={names.SANDBOX: sandbox},
        ),
        spec=PersistentVolumeClaimSpec(
            accessModes=["ReadWriteOnce"],
            storageClassName=options.storage_class,
            resources=VolumeResourceRequirements(requests={"storage": str(limits.disk)}),
        ),
    )
