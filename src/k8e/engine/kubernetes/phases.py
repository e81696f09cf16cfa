"""Reads from a pod's status how far its sandbox is, and why it is not further. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightkube.models.core_v1 import ContainerState, ContainerStatus, PodStatus
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.pods import CONTAINER


class Phase(enum.Enum):
    PENDING = "pending"
    RUNNING = "running"  # the agent was started
    FAILED = "failed"  # it will not start: waiting longer does not help
    ENDED = "ended"  # it ran, or was given up


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase
    cause: str = ""
    hint: str = ""
    control: str = "pod"


_RUNNING: Final = State(Phase.RUNNING)
_IMAGE: Final = "check the image's name, and the cluster's access to its registry (imagePullSecrets, network)"
# By the reason for which a container waits. ErrImagePull is not here: the kubelet tries again at once.
_HOPELESS: Final[Mapping[str, str]] = {
    "ImagePullBackOff": _IMAGE,
    "ErrImageNeverPull": "the image is not on the node and the pull policy is Never",
    "InvalidImageName": "check the image's name",
    "ImageInspectError": "the node's image store is damaged",
    "CreateContainerConfigError": "",
    "CreateContainerError": "",
    "RunContainerError": "the image must be one for the node's architecture",
    "StartError": "the image must be one for the node's architecture",
    "CrashLoopBackOff": "",
}
# By the reason of a pod or of its condition DisruptionTarget.
_ENDS: Final[Mapping[str, str]] = {
    "Evicted": "the node was short of memory or disk, or the sandbox exceeded its disk limit",
    "DeadlineExceeded": "a pod lives for at most [kubernetes] life",
    "DeletionByTaintManager": "its node does not answer, or was emptied",
    "DeletionByPodGC": "its node is gone",
    "EvictionByEvictionAPI": "its node is being emptied",
    "PreemptionByScheduler": "a pod of higher priority took its place",
    "TerminationByKubelet": "its node was short of resources, or shut down",
    "NodeShutdown": "its node was shut down",
    "NodeLost": "its node does not answer",
}


def read_state(pod: Pod) -> State:
    status = pod.status or PodStatus()
    if status.phase in ("Succeeded", "Failed"):
        return _explain_end(status)
    if pod.metadata is None or pod.metadata.deletionTimestamp is not None:
        return State(Phase.ENDED, _find_disruption(status) or "its pod is being deleted")
    own = next((one for one in status.containerStatuses or () if one.name == CONTAINER), None)
    state = own.state if own is not None and own.state is not None else ContainerState()
    if state.terminated is not None:
        return _explain_end(status)
    if state.running is not None and status.podIP:
        return _RUNNING
    for one in (*(status.initContainerStatuses or ()), *(status.containerStatuses or ())):
        waiting = one.state.waiting if one.state is not None else None
        if waiting is not None and waiting.reason in _HOPELESS:
            control = "image" if "Image" in waiting.reason else "pod"
            return State(Phase.FAILED, _join(waiting.reason, waiting.message), _HOPELESS[waiting.reason], control)
        if waiting is not None and waiting.reason == "ErrImagePull":
            return State(Phase.PENDING, _join(waiting.reason, waiting.message), _IMAGE, "image")
    return _explain_wait(status)


def _explain_wait(status: PodStatus) -> State:
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return State(
                Phase.PENDING,
                _join(condition.reason, condition.message),
                "no node has room for it: add one, or make the sandbox's limits or [kubernetes] requests smaller",
                "node",
            )
    return State(Phase.PENDING, "its containers are being created")


def _explain_end(status: PodStatus) -> State:
    if disruption := _find_disruption(status):
        return State(Phase.ENDED, disruption)
    if status.reason:
        known = _ENDS.get(status.reason, "")
        return State(Phase.ENDED, _join(status.reason, status.message or known), known if status.message else "")
    for one in (*(status.initContainerStatuses or ()), *(status.containerStatuses or ())):
        ended = one.state.terminated if one.state is not None else None
        if ended is not None and (ended.exitCode or one.name == CONTAINER):
            cause = _join(ended.reason, ended.message or f"exit code {ended.exitCode}")
            return State(Phase.ENDED, f"container {one.name}: {cause}")
    return State(Phase.ENDED, f"its pod has {(status.phase or 'ended').lower()}")


def _find_disruption(status: PodStatus) -> str:
    for condition in status.conditions or ():
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _join(condition.reason, condition.message or _ENDS.get(condition.reason or "", ""))
    return ""


def _join(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part) or "no reason is given"


def count_oom_kills(pod: Pod) -> int:
    """Of the agent's own process, or of all of them together: of a kill among its commands Kubernetes tells nothing."""
    statuses: list[ContainerStatus] = list((pod.status.containerStatuses or ()) if pod.status is not None else ())
    ends = [one.state.terminated for one in statuses if one.state is not None and one.state.terminated is not None]
    return sum(end.reason == "OOMKilled" for end in ends)
