"""The source of a mount: a directory of the machine, opened once, as the user who asked for it.

Everything after that goes through the descriptor: whatever is renamed or replaced later on the way there, the directory
that was checked is the one that is mounted.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from k8e.engine import Mount, MountRefused
from k8e.engine.local.layout import Layout
from k8e.engine.local.system.calls import (
    AT_FDCWD,
    RESOLVE_NO_MAGICLINKS,
    drop_capabilities,
    openat2,
    setfsgid,
    setfsuid,
    setgroups,
)
from k8e.engine.tasks import in_own_thread

# The kernel's own, and directories that lead to everything.
_NEVER = ("/proc", "/sys", "/dev")
T = TypeVar("T")

_MOST_GROUPS: Final = 64


@contextlib.contextmanager
def open_source(mount: Mount, owner: Owner, layout: Layout) -> Iterator[int]:
    """Raises MountRefused when its owner cannot get there, or when no sandbox may see it."""
    try:
        handle = act_as(owner, lambda: _open_and_enter(mount.source))
    except NotADirectoryError as error:
        raise refusal(mount, "it is not a directory", "Name the directory that it is in.") from error
    except OSError as error:
        cause = f"user {owner.uid} cannot enter it: {error.strerror}"
        raise refusal(mount, cause, "Name one that this user can enter.") from error
    try:
        _check(mount, handle, owner, layout)
        yield handle
    finally:
        os.close(handle)


def refusal(mount: Mount, cause: str, hint: str = "") -> MountRefused:
    return MountRefused(f"mount {mount.source}", cause, hint)


def find_path(handle: int) -> str:
    """Returns where it is now."""
    return os.readlink(f"/proc/self/fd/{handle}")


def _open_and_enter(path: str) -> int:
    handle = openat2(AT_FDCWD, path, os.O_PATH | os.O_DIRECTORY, RESOLVE_NO_MAGICLINKS)
    try:
        os.stat(".", dir_fd=handle)  # to have found it is not to be allowed in
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(mount: Mount, handle: int, owner: Owner, layout: Layout) -> None:
    found = os.fstat(handle)
    path = find_path(handle)
    if path == "/" or _is_any_of(found, [Path("/")]):
        raise refusal(mount, "it is the whole machine", "Name the directory that is needed.")
    if any(f"{path}/".startswith(f"{never}/") for never in _NEVER):
        raise refusal(mount, "it is the kernel's", "Name a directory with files.")
    for own in (layout.state, layout.run):
        real = own.resolve()
        if f"{path}/".startswith(f"{real}/") or _is_any_of(found, (real, *real.parents)):
            hint = "Name a directory that has nothing to do with it."
            raise refusal(mount, "the daemon's own files are in there", hint)
    if mount.writable and owner.home:
        home = Path(owner.home)
        if _is_any_of(found, (home, *home.parents)):
            hint = "Name a directory below it, or show it read-only."
            raise refusal(mount, f"the whole home of user {owner.uid} cannot be shown writable", hint)


def _is_any_of(found: os.stat_result, paths: Iterable[Path]) -> bool:
    """Compares inodes: a mount may give a directory another name."""
    for path in paths:
        with contextlib.suppress(OSError):  # it is not there
            if os.path.samestat(found, os.stat(path)):
                return True
    return False


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
    """Runs it with that user's rights over files, and without any other power.

    The kernel keeps the ids by which files are reached for each thread (setfsuid, setgroups), and takes root's powers
    over files away with them. So the work has a thread of its own: no other thread changes, and the user need not be
    able to execute any program. Signals look at other ids than these: the user gets no hold on the daemon meanwhile.
    """

    def perform() -> T:
        setgroups(owner.groups)
        setfsgid(owner.gid)
        setfsuid(owner.uid)
        drop_capabilities()
        return work()

    return in_own_thread(perform) if owner.uid else work()  # root's rights are the daemon's
