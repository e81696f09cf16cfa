"""Which hosts a session may reach, as pure logic: one canonical form of a list decides everywhere.

No I/O, and nothing of ours is imported."""

from k8e.policy.addresses import Address, AddressKind, kind_of, may_answer, may_list
from k8e.policy.hosts import DEFAULT_PORTS, NOTHING, HostEntry, HostList, InvalidEntry, canonical_name, excess

__all__ = [
    "DEFAULT_PORTS",
    "NOTHING",
    "Address",
    "AddressKind",
    "HostEntry",
    "HostList",
    "InvalidEntry",
    "canonical_name",
    "excess",
    "kind_of",
    "may_answer",
    "may_list",
]
