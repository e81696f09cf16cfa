"""The system calls that native sandboxes may make: an allowlist, as an OCI seccomp section.

What is not named here fails with EPERM; calls newer than the list, and clone3 (whose flags a filter cannot see), with
ENOSYS, so that programs fall back to the older call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

_ENOSYS = 38
_EPERM = 1

# Creating any namespace, above all user namespaces, from where much of the kernel's attack surface becomes reachable.
_NAMESPACE_FLAGS = 0x7E020000  # NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET, and NEWNS
_NEWTIME = 0x00000080

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0
_FAMILIES = (AF_UNIX, AF_INET, AF_INET6)

# What mknod may make; devices are nobody's business, with or without the capability.
_NODE_TYPES = (0, 0o100000, 0o010000, 0o140000)  # a file (twice), a FIFO, a socket
_TYPE_MASK = 0o170000

TIOCSTI, TIOCLINUX = 0x5412, 0x541C

_MOUNTS = (0x1000, 0x1026)  # MS_BIND; and for what is bound to be written to, with MS_REMOUNT, NODEV and NOSUID
_MNT_DETACH = 2
_ALL = 0xFFFFFFFFFFFFFFFF  # the kernel looks at 64 bits

_SET_USER_ID = 0o4000
_CREATES = 0x40 | 0x400000  # O_CREAT, O_TMPFILE: only then the mode is looked at
# Where the mode stands among the arguments of calls that set one.
_MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1}
_OPENS = {"open": (1, 2), "openat": (2, 3)}  # flags, mode


def match(index: int, value: int, mask: int = 0xFFFFFFFF) -> dict[str, Any]:
    """Compares the bits of an argument that the kernel looks at; the rest could hide anything."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def all_but(index: int, values: Iterable[int], width: int = 32) -> list[list[dict[str, Any]]]:
    """Alternatives that together match every value of an argument's low bits except the given ones.

    A filter that compares for "not equal" looks at all 64 bits, where the kernel uses 32: 0x1_0000_5412 would pass as
    something else than 0x5412. So the complement is spelled in masks, as the tree of bits in which the values lie.
    """
    alternatives = []

    def descend(prefix: int, mask: int, bit: int, left: frozenset[int]) -> None:
        for branch in (0, 1):
            chosen = prefix | branch << bit
            inside = frozenset(value for value in left if value >> bit & 1 == branch)
            if not inside:
                alternatives.append([match(index, chosen, mask | 1 << bit)])
            elif bit > 0:
                descend(chosen, mask | 1 << bit, bit - 1, inside)

    descend(0, 0, width - 1, frozenset(values))
    return alternatives


def allow(names: Iterable[str], args: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"names": sorted(names), "action": "SCMP_ACT_ALLOW", **({"args": args} if args else {})}


def _without_set_user_id() -> list[dict[str, Any]]:
    """Files of a directory of the machine belong to one of its users out there: whoever runs one with this bit would be
    that user."""
    rules = [allow([call], [match(index, 0, _SET_USER_ID)]) for call, index in _MODE_AT.items()]
    for call, (flags, mode) in _OPENS.items():
        rules.append(allow([call], [match(flags, 0, _CREATES)]))
        rules.append(allow([call], [match(flags, 0x40, 0x40), match(mode, 0, _SET_USER_ID)]))
        rules.append(allow([call], [match(flags, 0x400000, 0x400040), match(mode, 0, _SET_USER_ID)]))
    return rules


def build_profile(
    machine: str, native: bool = True, *, set_user_id: bool = True, mounting: bool = False
) -> Mapping[str, Any]:
    """`set_user_id`: whether files can be given that bit, which does nothing inside. `mounting`: whether the agent can
    mount something later; it takes these calls from itself, and from every command, before there is one."""
    lists = json.loads(resources.files("k8e.engine.local").joinpath("syscalls.json").read_text())
    plain = set(lists["any"]) | set(lists.get(machine, ()))
    absent = set(lists["absent"])
    rules = []
    if not set_user_id:
        plain -= {"openat2", *_MODE_AT, *_OPENS}
        absent.add("openat2")  # a filter cannot see its mode
        rules += _without_set_user_id()
    rules.append(allow(plain))
    if mounting:
        rules += [allow(["mount"], [match(3, flags, _ALL)]) for flags in _MOUNTS]
        rules.append(allow(["umount2"], [match(1, _MNT_DETACH)]))
    rules.append(allow(["clone"], [match(0, 0, _NAMESPACE_FLAGS | _NEWTIME)]))
    rules += [allow(["socket"], [match(0, family)]) for family in _FAMILIES]
    rules.append(allow(["socket"], [match(0, AF_NETLINK), match(2, _NETLINK_ROUTE)]))
    rules += [allow(["ioctl"], args) for args in all_but(1, (TIOCSTI, TIOCLINUX))]
    mask = _TYPE_MASK if set_user_id else _TYPE_MASK | _SET_USER_ID
    for kind in _NODE_TYPES:
        rules.append(allow(["mknod"], [match(1, kind, mask)]))
        rules.append(allow(["mknodat"], [match(2, kind, mask)]))
    # PER_LINUX, and the query; 32-bit personalities and ADDR_NO_RANDOMIZE's neighbours are not needed.
    rules += [allow(["personality"], [match(0, value)]) for value in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)]
    # gVisor knows no other errno than EPERM, on which glibc does not fall back and no thread starts. But it answers
    # ENOSYS to a call that an absent tracer should decide on; whoever brings one is alone with gVisor's own kernel.
    answer = {"action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS} if native else {"action": "SCMP_ACT_TRACE"}
    rules.append({"names": sorted(absent), **answer})
    architectures = {"x86_64": ["SCMP_ARCH_X86_64"], "aarch64": ["SCMP_ARCH_AARCH64"]}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": architectures[machine],
        "syscalls": rules,
    }
