"""The system calls that programs in a sandbox may make: an allowlist, as an OCI seccomp section.

What is not named here fails with EPERM; calls newer than the list, and clone3 (whose flags a filter cannot see), with
ENOSYS, so that programs fall back to the older call. Natively the machine's kernel applies it; in gVisor its own kernel
does, and what has to hold against that kernel is in host_filter.py.
"""

from __future__ import annotations

import functools
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
# Of the internet's: for another type or protocol the kernel would look for a module (SCTP, DCCP, L2TP), and SOCK_PACKET
# is another family.
_STREAM, _DATAGRAM = 1, 2
_TYPES = 0xF  # the rest are flags
_TCP, _UDP, _MPTCP, _PING = 6, 17, 262, {AF_INET: 1, AF_INET6: 58}

# What debuggers ask for. Missing are the requests after which a tracer can put another system call in the place of the
# one that the filter saw: gVisor's kernel looks at the number again after the stop, and does not ask the filter again.
# PTRACE_SYSCALL, SYSEMU, SYSEMU_SINGLESTEP, SET_SYSCALL_INFO are such; so is PTRACE_O_TRACESECCOMP.
_PTRACE_REQUESTS = (
    *range(10),  # TRACEME, PEEK and POKE, CONT, KILL, SINGLESTEP
    *range(12, 20),  # registers, ATTACH, DETACH
    *(25, 26, 30),  # thread areas, ARCH_PRCTL
    *range(0x4201, 0x4206),  # GETEVENTMSG, GETSIGINFO, SETSIGINFO, GETREGSET, SETREGSET
    *range(0x4207, 0x420C),  # INTERRUPT, LISTEN, PEEKSIGINFO, signal masks
    0x420E,  # GET_SYSCALL_INFO
)
_PTRACE_OPTIONS = (0x4200, 0x4206)  # SETOPTIONS, SEIZE: both take them as the fourth argument
_TRACESECCOMP = 0x80

# What mknod may make: no devices, with or without the capability.
_NODE_TYPES = (0, 0o100000, 0o010000, 0o140000)  # a file (twice), a FIFO, a socket
_TYPE_MASK = 0o170000

TIOCSTI, TIOCLINUX = 0x5412, 0x541C

_MOUNTS = (0x1000, 0x1026)  # MS_BIND; and for what is bound to be written to, with MS_REMOUNT, NODEV and NOSUID
_MNT_DETACH = 2
_ALL = 0xFFFFFFFFFFFFFFFF  # the kernel looks at 64 bits

# Ways to take blocks beyond a file's end that the limit of a file's size does not count: they keep that size, or shift
# what is there. A VMM has an image on the machine's own disk.
_COUNTED = (0, 3, 0x10)  # modes of fallocate: to make longer, to punch a hole, to write zeros
_RESERVES = (0x40305828, 0x4030582A, 0x40305839)  # FS_IOC_RESVSP, RESVSP64, ZERO_RANGE

_SET_IDS = 0o6000
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


def _without_set_ids() -> list[dict[str, Any]]:
    """Files of a directory of the machine belong to one of its users out there: another user who runs one with such a
    bit would be that user."""
    rules = [allow([call], [match(index, 0, _SET_IDS)]) for call, index in _MODE_AT.items()]
    for call, (flags, mode) in _OPENS.items():
        rules.append(allow([call], [match(flags, 0, _CREATES)]))
        rules.append(allow([call], [match(flags, 0x40, 0x40), match(mode, 0, _SET_IDS)]))
        rules.append(allow([call], [match(flags, 0x400000, 0x400040), match(mode, 0, _SET_IDS)]))
    return rules


def _debugging() -> list[dict[str, Any]]:
    rules = [allow(["ptrace"], [match(0, request, _ALL)]) for request in _PTRACE_REQUESTS]
    rules += [allow(["ptrace"], [match(0, request, _ALL), match(3, 0, _TRACESECCOMP)]) for request in _PTRACE_OPTIONS]
    return rules


@functools.cache
def build_profile(
    machine: str, native: bool = True, *, set_ids: bool = True, mounting: bool = False, reserving: bool = True
) -> Mapping[str, Any]:
    """`set_ids`: whether files can be given set-user-id and set-group-id bits, which do nothing inside. `mounting`:
    whether the agent can mount something later; it takes these calls from itself, and from every command, before there
    is one. `reserving`: whether blocks can be taken beyond a file's end."""
    lists = json.loads(resources.files("k8e.engine.local.runtime").joinpath("syscalls.json").read_text())
    plain = set(lists["any"]) | set(lists.get(machine, ()))
    absent = set(lists["absent"])
    rules = []
    if not set_ids:
        plain -= {"openat2", *_MODE_AT, *_OPENS}
        absent.add("openat2")  # a filter cannot see its mode
        rules += _without_set_ids()
    if not reserving:
        plain.remove("fallocate")
        rules += [allow(["fallocate"], [match(1, mode)]) for mode in _COUNTED]
    rules.append(allow(plain))
    if mounting:
        rules += [allow(["mount"], [match(3, flags, _ALL)]) for flags in _MOUNTS]
        rules.append(allow(["umount2"], [match(1, _MNT_DETACH)]))
    rules.append(allow(["clone"], [match(0, 0, _NAMESPACE_FLAGS | _NEWTIME)]))
    rules.append(allow(["socket"], [match(0, AF_UNIX)]))
    for family, ping in _PING.items():
        for kind, protocols in ((_STREAM, (0, _TCP, _MPTCP)), (_DATAGRAM, (0, _UDP, ping))):
            for protocol in protocols:
                rules.append(allow(["socket"], [match(0, family), match(1, kind, _TYPES), match(2, protocol)]))
    rules.append(allow(["socket"], [match(0, AF_NETLINK), match(2, _NETLINK_ROUTE)]))
    rules.append(allow(["socketpair"], [match(0, AF_UNIX)]))
    refused = (TIOCSTI, TIOCLINUX) if reserving else (TIOCSTI, TIOCLINUX, *_RESERVES)
    rules += [allow(["ioctl"], args) for args in all_but(1, refused)]
    rules += [allow(["ptrace"])] if native else _debugging()
    mask = _TYPE_MASK if set_ids else _TYPE_MASK | _SET_IDS
    for kind in _NODE_TYPES:
        rules.append(allow(["mknod"], [match(1, kind, mask)]))
        rules.append(allow(["mknodat"], [match(2, kind, mask)]))
    # PER_LINUX, and the query; 32-bit personalities and ADDR_NO_RANDOMIZE's neighbours are not needed.
    rules += [allow(["personality"], [match(0, value)]) for value in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)]
    # gVisor knows no other errno than EPERM, on which glibc does not fall back and no thread starts. But it answers
    # ENOSYS to a call that a tracer should decide on and there is none; `_debugging` sees to it that there never is.
    answer = {"action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS} if native else {"action": "SCMP_ACT_TRACE"}
    rules.append({"names": sorted(absent), **answer})
    architectures = {"x86_64": ["SCMP_ARCH_X86_64"], "aarch64": ["SCMP_ARCH_AARCH64"]}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": architectures[machine],
        "syscalls": rules,
    }
