"""Other processes, first of all the agent, and more rights for its own."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

from .calls import ATTEMPTS, attempt, call, scratch, try_every


def trace_agent(request: int) -> object:
    return call("ptrace", request, 1, 0, 0)


ATTEMPTS["ptrace-attach-agent"] = lambda: trace_agent(16)
ATTEMPTS["ptrace-seize-agent"] = lambda: trace_agent(0x4206)
ATTEMPTS["process_madvise-agent"] = lambda: call("process_madvise", call("pidfd_open", 1, 0), bytes(16), 1, 20, 0)
ATTEMPTS["pidfd_getfd-agent"] = lambda: call("pidfd_getfd", call("pidfd_open", 1, 0), 0, 0)
ATTEMPTS["process_mrelease-agent"] = lambda: call("process_mrelease", call("pidfd_open", 1, 0), 0)


def reach_into_agent(name: str) -> object:
    local = ctypes.create_string_buffer(64)
    here = struct.pack("<QQ", ctypes.addressof(local), 8)
    there = struct.pack("<QQ", 0x400000, 8)
    return call(name, 1, here, 1, there, 1, 0)


ATTEMPTS["process_vm_readv-agent"] = lambda: reach_into_agent("process_vm_readv")
ATTEMPTS["process_vm_writev-agent"] = lambda: reach_into_agent("process_vm_writev")


@attempt("read-agents-memory")
def read_agents_memory() -> object:
    with open("/proc/1/maps") as file:
        first = file.readline()
    if not first:
        raise OSError(errno.EACCES, "no mappings are shown")
    start = int(first.split("-")[0], 16)
    with open("/proc/1/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(4).hex()


@attempt("open-agents-descriptors")
def open_agents_descriptors() -> object:
    names = os.listdir("/proc/1/fd")  # numbers alone are no secret
    return try_every(*(lambda n=name: os.open(f"/proc/1/fd/{n}", os.O_RDONLY) for name in names))


@attempt("read-agents-environment")
def read_agents_environment() -> object:
    with open("/proc/1/environ", "rb") as file:
        found = file.read()
    if not found:
        raise OSError(errno.EACCES, "empty")
    return found.hex()


@attempt("all-capabilities")
def take_all_capabilities() -> object:
    header = struct.pack("<Ii", 0x20080522, 0)
    return call("capset", header, struct.pack("<IIIIII", *[0xFFFFFFFF] * 2, 0, 0x1FF, 0x1FF, 0))


@attempt("ambient-capability")
def raise_ambient() -> object:
    return call("prctl", 47, 2, 21, 0, 0)  # CAP_SYS_ADMIN


@attempt("clear-no-new-privileges")
def clear_no_new_privileges() -> object:
    return call("prctl", 38, 0, 0, 0, 0)


@attempt("file-capability")
def give_file_capability() -> object:
    path = f"{scratch()}/file"
    with open(path, "wb"):
        pass
    os.setxattr(path, "security.capability", struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0x1FF, 0))
    return "given"


@attempt("become-somebody-else")
def become_somebody_else() -> object:
    """Root is one already: who is not, tries to become it; root tries to become the user that it may not act for."""
    os.setresuid(*((0, 0, 0) if os.getuid() else (1000, 1000, 1000)))
    return os.getresuid()


@attempt("join-groups")
def join_groups() -> object:
    os.setgroups([0, 1, 2, 4, 6])
    return os.getgroups()


@attempt("trusted-attribute")
def set_trusted_attribute() -> object:
    os.setxattr(scratch(), "trusted.overlay.opaque", b"y")
    return "set"


def raise_limit(what: int, value: int) -> None:
    try:
        resource.setrlimit(what, (value, value))
    except ValueError as error:  # which is what Python makes of EPERM here
        raise PermissionError(errno.EPERM, str(error)) from error


@attempt("more-open-files")
def raise_open_files() -> object:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit(resource.RLIMIT_NOFILE, hard + 1)
    return hard + 1


@attempt("core-dumps")
def raise_core() -> object:
    raise_limit(resource.RLIMIT_CORE, resource.RLIM_INFINITY)
    return "unlimited"


@attempt("real-time-scheduling")
def go_real_time() -> object:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return os.sched_getscheduler(0)
