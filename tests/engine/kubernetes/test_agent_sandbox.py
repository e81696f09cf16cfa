"""The names of warm pools, and the images that sessions may name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k8e.engine import EngineError, Limits, Runtime, SandboxSpec
from k8e.engine.kubernetes.agent_sandbox import build_sandbox_claim, build_template, name_kind
from k8e.engine.kubernetes.images import ClusterImages
from k8e.engine.kubernetes.options import ClusterOptions
from k8e.engine.kubernetes.pods import PodPlan, build_pod

OPTIONS = ClusterOptions("k8e", "image", "agent", "policy")
PLAN = PodPlan("", "gateway", "6b" * 32, ("--port", "10539"), "gvisor", "image")
SPEC = SandboxSpec(Runtime.GVISOR)


def name(spec: SandboxSpec = SPEC, plan: PodPlan = PLAN) -> str:
    return name_kind(build_pod(spec, plan, OPTIONS), "gateway")


def test_what_cannot_be_changed_on_a_pod_is_part_of_the_kind() -> None:
    others = {
        name(replace(SPEC, limits=Limits(cpus=2.0))),
        name(replace(SPEC, limits=Limits(memory=2 << 30))),
        name(replace(SPEC, limits=Limits(disk=1 << 30))),
        name(plan=replace(PLAN, image="another")),
        name(plan=replace(PLAN, runtime_class="kata")),
        name(plan=replace(PLAN, agent_arguments=("--port", "1"))),
    }
    assert len(others - {name()}) == 6
    assert name(replace(SPEC, life=60.0)) == name()


def test_a_warm_pod_belongs_to_no_sandbox_and_has_no_end() -> None:
    pod = build_pod(SPEC, PLAN, OPTIONS)
    template = build_template(name(), pod, "gateway")
    assert template.spec is not None
    assert template.spec.network_policy_management == "Unmanaged"
    assert "k8e.dev/sandbox" not in (template.spec.pod_template.metadata.annotations or {})
    assert template.spec.pod_template.spec.activeDeadlineSeconds is None


def test_a_claim_ends_at_its_time() -> None:
    claim = build_sandbox_claim("one", "pool", "gateway", 1_800_000_000.7)
    assert claim.spec is not None
    assert claim.spec.lifecycle is not None
    assert claim.spec.lifecycle.shutdown_time == "2027-01-15T08:00:00Z"
    assert claim.spec.lifecycle.shutdown_policy == "DeleteForeground"


def test_sessions_name_images_that_are_listed() -> None:
    images = ClusterImages(["registry.example.com/team/", "docker.io/library/python:3.13"])
    assert images.refer("registry.example.com/team/tool:1") == "registry.example.com/team/tool:1"
    assert images.refer("docker.io/library/python:3.13")
    for other in ("docker.io/library/python:3.13.1", "registry.example.com/teams/tool:1", "docker.io/library/alpine:1"):
        with pytest.raises(EngineError, match="may not be named") as caught:
            images.refer(other)
        assert "[kubernetes] images" in caught.value.hint
    with pytest.raises(EngineError):
        ClusterImages([]).refer("docker.io/library/alpine:latest")
    assert ClusterImages(["*"]).refer("docker.io/library/alpine:latest")
