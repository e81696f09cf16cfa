"""Acting on the machine's files with the rights of one of its users.

The kernel keeps the ids by which files are reached for each thread (setfsuid, setgroups), and takes root's powers over
files away with them. So it is a thread, of its own, that ends when the work is done: nothing has to be put back, no
other thread notices, and no program has to be one that this user can execute. Signals look at other ids than these: the
user gets no hold on the daemon meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# Not libc's setgroups and capset, of which the first changes every thread.
_CALLS: Final = {"x86_64": (116, 126), "aarch64": (159, 91)}
_MOST_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class Owner:
    """A user of the machine, as its files know them."""

    uid: int
    gid: int
    groups: tuple[int, ...]  # besides the first
    home: str  # empty: not known


def find_owner(uid: int) -> Owner:
    """One that the machine has no account for has the group of the same number, and no home."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return Owner(uid, uid, (), "")
    groups = dict.fromkeys(os.getgrouplist(account.pw_name, account.pw_gid))
    groups.pop(account.pw_gid, None)
    return Owner(uid, account.pw_gid, tuple(groups)[:_MOST_GROUPS], account.pw_dir)


def act_as(owner: Owner, work: Callable[[], T]) -> T:
    """Does it with that user's rights over files, and without any other power."""
    if owner.uid == 0:
        return work()  # whose rights are ours

    def perform() -> T:
        _become(owner)
        return work()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="k8e-owner") as thread:  # which ends here
        return thread.submit(perform).result()


def _become(owner: Owner) -> None:
    set_groups, set_capabilities = _CALLS[platform.machine()]
    groups = (ctypes.c_uint32 * max(1, len(owner.groups)))(*owner.groups)
    _call(set_groups, ctypes.c_size_t(len(owner.groups)), groups)
    for change, wanted in ((_libc.setfsgid, owner.gid), (_libc.setfsuid, owner.uid)):
        change(ctypes.c_uint32(wanted))
        if change(ctypes.c_uint32(0xFFFFFFFF)) != wanted:  # which says what it is now
            raise PermissionError(f"cannot act as user {owner.uid}")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the third version of the call; this thread
    _call(set_capabilities, header, (ctypes.c_uint32 * 6)())


def _call(number: int, *arguments: object) -> None:
    if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
