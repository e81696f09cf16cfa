"""What is read from a pod's status: every way not to run has a cause."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.phases import Phase, count_oom_kills, read_state
from tests.engine.kubernetes.pods import container, make_pod

RUNNING = container(running={"startedAt": "2026-01-01T00:00:00Z"})


def waiting(reason: str, name: str = "sandbox") -> dict[str, Any]:
    return container(name, waiting={"reason": reason, "message": "the kubelet's words"})


def ended(code: int, reason: str, name: str = "sandbox") -> dict[str, Any]:
    return container(name, terminated={"exitCode": code, "reason": reason})


def disrupted(reason: str) -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "why"}]


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]


@pytest.mark.parametrize(
    ("status", "phase", "cause", "control"),
    [
        ({}, Phase.PENDING, "created", "pod"),
        ({"phase": "Pending", "conditions": UNSCHEDULABLE}, Phase.PENDING, "0/3 nodes", "node"),
        ({"phase": "Running", "podIP": "10.1.1.1", "containerStatuses": [RUNNING]}, Phase.RUNNING, "", "pod"),
        ({"phase": "Running", "containerStatuses": [RUNNING]}, Phase.PENDING, "created", "pod"),  # without an address
        ({"containerStatuses": [waiting("ErrImagePull")]}, Phase.PENDING, "kubelet's words", "image"),
        ({"containerStatuses": [waiting("ImagePullBackOff")]}, Phase.FAILED, "kubelet's words", "image"),
        ({"initContainerStatuses": [waiting("ErrImageNeverPull", "agent")]}, Phase.FAILED, "NeverPull", "image"),
        ({"containerStatuses": [waiting("CreateContainerError")]}, Phase.FAILED, "kubelet's words", "pod"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, Phase.ENDED, "Evicted: disk", "pod"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, Phase.ENDED, "life", "pod"),
        ({"phase": "Failed", "containerStatuses": [ended(137, "OOMKilled")]}, Phase.ENDED, "OOMKilled", "pod"),
        ({"phase": "Failed", "initContainerStatuses": [ended(70, "Error", "agent")]}, Phase.ENDED, "agent", "pod"),
        ({"phase": "Succeeded"}, Phase.ENDED, "succeeded", "pod"),
        ({"phase": "Failed", "conditions": disrupted("DeletionByTaintManager")}, Phase.ENDED, "why", "pod"),
    ],
)
def test_states(status: dict[str, Any], phase: Phase, cause: str, control: str) -> None:
    state = read_state(make_pod(**status))
    assert (state.phase, state.control) == (phase, control)
    assert cause in state.cause


def test_one_that_is_being_deleted_has_ended() -> None:
    pod = make_pod(phase="Running", podIP="10.1.1.1", containerStatuses=[RUNNING])
    assert pod.metadata is not None
    pod.metadata.deletionTimestamp = datetime(2026, 1, 1, tzinfo=UTC)
    assert read_state(pod).phase is Phase.ENDED


REASONS = st.sampled_from(["Evicted", "ErrImagePull", "ImagePullBackOff", "OOMKilled", "NewReason", ""])
STATES = st.one_of(
    st.just({}),
    st.builds(lambda reason: {"waiting": {"reason": reason}}, REASONS),
    st.builds(lambda reason, code: {"terminated": {"exitCode": code, "reason": reason}}, REASONS, st.integers(0, 255)),
    st.just(RUNNING["state"]),
)
STATUSES = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "reason": REASONS,
        "podIP": st.just("10.1.1.1"),
        "containerStatuses": st.lists(st.builds(lambda state: container(**state), STATES), max_size=2),
        "initContainerStatuses": st.lists(st.builds(lambda state: container("agent", **state), STATES), max_size=1),
    },
)


@given(STATUSES)
def test_whatever_a_status_says_there_is_a_cause(status: dict[str, Any]) -> None:
    pod: Pod = make_pod(**status)
    state = read_state(pod)
    assert (state.phase is Phase.RUNNING) != bool(state.cause)
    assert count_oom_kills(pod) >= 0


def test_a_kill_for_want_of_memory_is_counted() -> None:
    assert count_oom_kills(make_pod(containerStatuses=[ended(137, "OOMKilled")])) == 1
    assert count_oom_kills(make_pod(containerStatuses=[ended(1, "Error")])) == 0
