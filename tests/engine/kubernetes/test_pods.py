"""What a sandbox's pod is: nothing of the rules of restricted Pod Security is left to a default."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightkube.models.core_v1 import Container, PodSpec

from k8e.engine import Limits, Runtime, SandboxSpec, Shape
from k8e.engine.kubernetes.egress_objects import WANTED, read_wanted
from k8e.engine.kubernetes.options import NODE, OPEN, POLICY, ClusterOptions
from k8e.engine.kubernetes.pods import PodPlan, build_claim, build_pod
from k8e.link.noise import pod_arguments
from k8e.policy import NOTHING, HostList

OPTIONS = ClusterOptions("sandboxes", "tools:1", "agent:1", POLICY)
PLAN = PodPlan("one", "gw", "6b" * 32, pod_arguments(b"k" * 32), runtime_class="gvisor", image="tools:1")
SPEC = SandboxSpec(Runtime.GVISOR, limits=Limits(cpus=1.5, memory=512 << 20, disk=1 << 30))


def build(spec: SandboxSpec = SPEC, plan: PodPlan = PLAN, options: ClusterOptions = OPTIONS) -> PodSpec:
    pod = build_pod(spec, plan, options).spec
    assert pod is not None
    return pod


def containers(pod: PodSpec) -> list[Container]:
    return [*(pod.initContainers or ()), *pod.containers]


def test_it_is_restricted() -> None:
    pod = build()
    assert pod.securityContext is not None
    assert pod.securityContext.runAsNonRoot
    assert pod.securityContext.runAsUser == 1000
    assert pod.securityContext.seccompProfile is not None
    assert pod.securityContext.seccompProfile.type == "RuntimeDefault"
    for container in containers(pod):
        context = container.securityContext
        assert context is not None
        assert context.allowPrivilegeEscalation is False
        assert context.capabilities is not None
        assert (context.capabilities.drop, context.capabilities.add) == (["ALL"], None)
        assert context.privileged is None
    assert {pod.hostNetwork, pod.hostPID, pod.hostIPC, pod.shareProcessNamespace} == {None}
    assert all(volume.hostPath is None for volume in pod.volumes or ())


def test_it_has_nothing_of_the_clusters() -> None:
    pod = build()
    assert pod.automountServiceAccountToken is False
    assert pod.enableServiceLinks is False
    assert pod.dnsPolicy == "None"


def test_the_cluster_resolves_names_only_where_nothing_is_controlled() -> None:
    pod = build(options=replace(OPTIONS, egress=OPEN))
    assert (pod.dnsPolicy, pod.dnsConfig) == ("Default", None)


def test_it_is_run_once_and_ends_without_a_gateway() -> None:
    pod = build(options=replace(OPTIONS, life=90.5))
    assert (pod.restartPolicy, pod.activeDeadlineSeconds) == ("Never", 91)


def test_limits_are_limits_and_a_part_of_them_is_requested() -> None:
    resources = build(options=replace(OPTIONS, requests=0.5)).containers[0].resources
    assert resources is not None
    assert resources.limits == {"cpu": "1500m", "memory": str(512 << 20), "ephemeral-storage": str(1 << 30)}
    assert resources.requests == {"cpu": "750m", "memory": str(256 << 20), "ephemeral-storage": str(1 << 29)}


@pytest.mark.parametrize(
    ("requests", "cpu", "memory"), [(1.0, "50m", 32 << 20), (0.01, "15m", round(0.01 * (512 << 20)))]
)
def test_the_installer_requests_no_more_than_the_sandbox(requests: float, cpu: str, memory: int) -> None:
    """A node counts the larger of the two for the pod's whole life."""
    (installer,) = build(options=replace(OPTIONS, requests=requests)).initContainers or []
    assert installer.resources is not None
    assert installer.resources.limits == {"cpu": "50m", "memory": str(32 << 20)}
    assert installer.resources.requests == {"cpu": cpu, "memory": str(memory)}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_read_only_shape_leaves_memory_and_tmp(read_only: bool) -> None:
    container = build(replace(SPEC, shape=Shape(read_only=read_only))).containers[0]
    assert container.securityContext is not None
    assert container.securityContext.readOnlyRootFilesystem is read_only
    writable = {mount.mountPath for mount in container.volumeMounts or () if not mount.readOnly}
    assert writable == {"/run", "/tmp"} | (set() if read_only else {"/workspace", "/home/user"})


def test_run_is_memory_with_a_limit() -> None:
    (run,) = [volume for volume in build().volumes or () if volume.name == "run"]
    assert run.emptyDir is not None
    assert (run.emptyDir.medium, run.emptyDir.sizeLimit) == ("Memory", str(128 << 20))


def test_the_agent_is_copied_in_and_cannot_be_changed() -> None:
    pod = build()
    (installer,) = pod.initContainers or []
    assert (installer.image, installer.command) == ("agent:1", ["/k8e-agent-pod", "--install", "/k8e"])
    container = pod.containers[0]
    assert container.command == ["/k8e/k8e-agent-pod"]
    (programs,) = [mount for mount in container.volumeMounts or () if mount.mountPath == "/k8e"]
    assert programs.readOnly


def test_a_user_namespace_is_asked_for_where_the_cluster_can() -> None:
    assert build().hostUsers is None
    assert build(plan=replace(PLAN, user_namespace=True)).hostUsers is False


def test_the_clusters_usual_runtime_has_no_class() -> None:
    assert build(plan=replace(PLAN, runtime_class="")).runtimeClassName is None


def test_only_a_volume_has_to_be_given_to_the_user() -> None:
    for claim, group in (("", None), ("k8e-one", 1000)):
        context = build(plan=replace(PLAN, claim=claim)).securityContext
        assert context is not None
        assert context.fsGroup == group


def test_a_volume_takes_the_place_of_the_workspace() -> None:
    (files,) = [volume for volume in build(plan=replace(PLAN, claim="k8e-one")).volumes or () if volume.name == "files"]
    assert files.emptyDir is None
    assert files.persistentVolumeClaim is not None
    claim = build_claim("one", "gw", SPEC.limits, replace(OPTIONS, storage_class="fast"))
    assert claim.metadata is not None
    assert claim.metadata.name == files.persistentVolumeClaim.claimName
    assert claim.spec is not None
    assert (claim.spec.storageClassName, claim.spec.accessModes) == ("fast", ["ReadWriteOnce"])


def test_a_warm_pod_has_an_empty_list_that_can_be_changed() -> None:
    """agent-sandbox's controller puts back what is in a template: a list that is not there stays as it was written."""
    options, listed = replace(OPTIONS, egress=NODE), replace(SPEC, egress=HostList.parse(["example.com"]))
    own, warm = (build_pod(listed, replace(PLAN, sandbox=name), options) for name in ("one", ""))
    for pod, hosts in ((own, listed.egress), (warm, NOTHING)):
        wanted = read_wanted(pod)
        assert wanted is not None
        assert (wanted.generation, wanted.hosts) == (1, hosts)
    assert warm.metadata is not None
    assert WANTED not in (warm.metadata.annotations or {})
    assert read_wanted(build_pod(SPEC, PLAN, OPTIONS)) is None
