"""Acting on the machine's files with the rights of one of its users.

The kernel keeps the ids by which files are reached for each thread (setfsuid, setgroups), and takes root's powers over
files away with them. So the work has a thread of its own: no other thread changes, and the user need not be able to
execute any program. Signals look at other ids than these: the user gets no hold on the daemon meanwhile.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from k8e.engine.local.system.calls import drop_capabilities, setfsgid, setfsuid, setgroups
from k8e.engine.local.system.tasks import in_own_thread

T = TypeVar("T")

_MOST_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class Owner:
    """A user of the machine, as its files know them."""

    uid: int
    gid: int
    groups: tuple[int, ...]  # besides the first
    home: str  # empty: not known


def find_owner(uid: int) -> Owner:
    """A uid without an account has the group of the same number, and no home."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return Owner(uid, uid, (), "")
    groups = dict.fromkeys(os.getgrouplist(account.pw_name, account.pw_gid))
    groups.pop(account.pw_gid, None)
    return Owner(uid, account.pw_gid, tuple(groups)[:_MOST_GROUPS], account.pw_dir)


def act_as(owner: Owner, work: Callable[[], T]) -> T:
    """Runs it with that user's rights over files, and without any other power."""

    def perform() -> T:
        setgroups(owner.groups)
        setfsgid(owner.gid)
        setfsuid(owner.uid)
        drop_capabilities()
        return work()

    return in_own_thread(perform) if owner.uid else work()  # root's rights are the daemon's
