"""Lists of hosts, as pure logic: one canonical form of a list decides everywhere. No I/O."""

from k8e.policy.addresses import (
    FORBIDDEN,
    GLOBAL,
    PRIVATE,
    Address,
    AddressKind,
    Network,
    kind_of,
    may_answer,
    may_list,
)
from k8e.policy.entries import DEFAULT_PORTS, EVERYTHING, HostEntry
from k8e.policy.hosts import NOTHING, HostList, common, excess
from k8e.policy.names import InvalidEntry, canonical_name, is_metadata_name
from k8e.policy.openings import find_opening

__all__ = [
    "DEFAULT_PORTS",
    "EVERYTHING",
    "FORBIDDEN",
    "GLOBAL",
    "NOTHING",
    "PRIVATE",
    "Address",
    "AddressKind",
    "HostEntry",
    "HostList",
    "InvalidEntry",
    "Network",
    "canonical_name",
    "common",
    "excess",
    "find_opening",
    "is_metadata_name",
    "kind_of",
    "may_answer",
    "may_list",
]
