"""Namespaces of its own, or those of others."""

from __future__ import annotations

import errno
import os
import struct

from .calls import ATTEMPTS, HIGH, NAMESPACES, attempt, call, scratch

SIGCHLD = 17


def clone_with(flags: int) -> object:
    pid = call("clone", flags | SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "cloned"


def clone3_with(flags: int) -> object:
    arguments = struct.pack("<11Q", flags, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call("clone3", arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "cloned"


def join_namespace(process: str, kind: str) -> object:
    handle = os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)
    return call("setns", handle, 0)


for _name, _flag in NAMESPACES.items():
    ATTEMPTS[f"unshare-{_name}"] = lambda flag=_flag: call("unshare", flag)  # type: ignore[misc]
    ATTEMPTS[f"clone3-{_name}"] = lambda flag=_flag: clone3_with(flag)  # type: ignore[misc]
    if _name != "time":  # clone takes that bit for a part of the signal's number
        ATTEMPTS[f"clone-{_name}"] = lambda flag=_flag: clone_with(flag)  # type: ignore[misc]
        ATTEMPTS[f"clone-{_name}-high-bits"] = lambda flag=_flag: clone_with(flag | HIGH)  # type: ignore[misc]
for _name in ("mnt", "cgroup", "uts", "ipc", "pid", "net", "user"):
    ATTEMPTS[f"setns-own-{_name}"] = lambda kind=_name: join_namespace("self", kind)  # type: ignore[misc]
    ATTEMPTS[f"setns-agents-{_name}"] = lambda kind=_name: join_namespace("1", kind)  # type: ignore[misc]


@attempt("user-namespace-and-mount")
def mount_in_user_namespace() -> object:
    call("unshare", NAMESPACES["user"] | NAMESPACES["mnt"])
    return call("mount", b"tmpfs", scratch().encode(), b"tmpfs", 0, None)


@attempt("user-namespace-and-capabilities")
def capabilities_in_user_namespace() -> object:
    call("unshare", NAMESPACES["user"])
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff"))
    if not int(effective, 16):
        raise PermissionError(errno.EPERM, "none")
    return effective
