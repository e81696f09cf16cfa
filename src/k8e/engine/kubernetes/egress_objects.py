"""Lists of hosts as the cluster's objects carry them. Pure.

The gateway writes the list that it wants to an annotation of the pod, with a number that grows. The helper of the
pod's node answers with a condition of the pod's status: up to which number the lists are in force, and where and by
which key the helper is reached.

A pod of a warm pool has no such annotation until it is claimed, and its list is empty: the controller of the pool puts
back whatever is in its template, so a list in there could not be changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes import names
from k8e.policy import NOTHING, HostList, InvalidEntry

WANTED: Final = "k8e.dev/egress"  # annotation, the gateway's
FIRST: Final = 1  # the number of the list that a pod is made with
LIST: Final = "k8e.dev/egress-list"  # label, under Cilium: the digest of the list that a pod is made with
IN_FORCE: Final = "k8e.dev/egress-in-force"  # type of a condition, the helper's


@dataclass(frozen=True, slots=True)
class Wanted:
    generation: int
    hosts: HostList

    def text(self) -> str:
        return json.dumps({"generation": self.generation, "hosts": self.hosts.texts})


@dataclass(frozen=True, slots=True)
class InForce:
    generation: int  # the one that was looked at last
    address: str  # of the helper
    port: int
    key: str  # its public key, in hexadecimal
    error: str = ""  # why that one is not in force: the one before it still is

    def text(self) -> str:
        return json.dumps(
            {
                "generation": self.generation,
                "address": self.address,
                "port": self.port,
                "key": self.key,
                "error": self.error[:2000],
            }
        )

    def condition(self, now: str) -> Mapping[str, Any]:
        applied = not self.error
        return {
            "type": IN_FORCE,
            "status": "True" if applied else "False",
            "reason": "Applied" if applied else "Refused",
            "message": self.text(),
            "lastTransitionTime": now,
        }


def digest_list(hosts: HostList) -> str:
    """Names a list by its canonical form; short enough for a label."""
    return hashlib.sha256("\n".join(hosts.texts).encode()).hexdigest()[:32]


def read_wanted(pod: Pod) -> Wanted | None:
    """None: the pod has no list, or none that can be read."""
    annotations = (pod.metadata.annotations if pod.metadata is not None else None) or {}
    if WANTED not in annotations:
        return Wanted(FIRST, NOTHING) if names.GATEWAY_KEY in annotations else None
    try:
        found = json.loads(annotations[WANTED])
        return Wanted(int(found["generation"]), HostList.parse(map(str, found["hosts"])))
    except (ValueError, LookupError, TypeError, InvalidEntry):
        return None


def read_in_force(pod: Pod) -> InForce | None:
    for condition in (pod.status.conditions if pod.status is not None else None) or ():
        if condition.type == IN_FORCE:
            try:
                found = json.loads(condition.message or "")
                return InForce(
                    int(found["generation"]),
                    str(found["address"]),
                    int(found["port"]),
                    str(found["key"]),
                    str(found["error"]),
                )
            except (ValueError, LookupError, TypeError):
                return None
    return None
