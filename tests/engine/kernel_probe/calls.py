"""System calls by their numbers, and the list of all attempts, to which the other modules add theirs."""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Callable

X86 = platform.machine() == "x86_64"
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
HIGH = 1 << 32  # a bit that the kernel ignores in 32-bit arguments and that a filter must ignore as well
AT_FDCWD = -100

# x86_64, aarch64; one number where they are the same; None where a machine has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "ptrace": (101, 117),
    "syslog": (103, 116), "capset": (126, 91), "uselib": (134, None), "personality": (135, 92), "vhangup": (153, 58),
    "modify_ldt": (154, None), "pivot_root": (155, 41), "_sysctl": (156, None), "prctl": (157, 167),
    "adjtimex": (159, 171), "chroot": (161, 51), "acct": (163, 89), "settimeofday": (164, 170), "mount": (165, 40),
    "umount2": (166, 39), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None), "create_module": (174, None),
    "init_module": (175, 105), "delete_module": (176, 106), "quotactl": (179, 60), "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18), "clock_settime": (227, 112), "kexec_load": (246, 104), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "setns": (308, 268), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "finit_module": (313, 273), "kexec_file_load": (320, 294), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_open": (434, 434), "clone3": (435, 435),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443), "memfd_secret": (447, 447), "process_mrelease": (448, 448), "statmount": (457, 457),
    "listmount": (458, 458), "open_tree_attr": (467, 467),
}  # fmt: skip

NAMESPACES = {
    "time": 0x80,
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}

Attempt = Callable[[], object]
ATTEMPTS: dict[str, Attempt] = {}


class NoSuchCall(Exception):
    """This machine has no such system call, which is as good as denied."""


def attempt(name: str) -> Callable[[Attempt], Attempt]:
    def register(function: Attempt) -> Attempt:
        ATTEMPTS[name] = function
        return function

    return register


def call(name: str, *arguments: object) -> int:
    number = NUMBERS[name][0 if X86 else 1]
    if number is None:
        raise NoSuchCall(name)
    return call_number(number, *arguments)


def call_number(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    ctypes.set_errno(0)
    result = int(LIBC.syscall(ctypes.c_long(number), *words))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def try_every(*attempts: Attempt) -> object:
    """Done when one of them is; otherwise what the last one met."""
    last: OSError | None = None
    for one in attempts:
        try:
            return one()
        except OSError as error:
            last = error
    assert last is not None
    raise last


def scratch() -> str:
    """Of this attempt's own; the mount points and files in it can be lost."""
    return tempfile.mkdtemp(prefix="probe-", dir="/tmp")
