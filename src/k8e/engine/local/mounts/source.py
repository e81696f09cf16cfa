"""Opening a directory of the machine for a sandbox: as the user who asked for it, once, as a descriptor.

Everything after that goes through the descriptor, so whatever is renamed or replaced on the way there later, it is this
directory that was looked at and this one that is shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from k8e.engine import Mount, MountRefused
from k8e.engine.local.layout import Layout
from k8e.engine.local.mounts.kernel import AT_FDCWD, NO_MAGICLINKS, open_resolved
from k8e.engine.local.mounts.owner import Owner, act_as

# The kernel's own, and what leads to everything.
_NEVER = ("/proc", "/sys", "/dev")
_FLAGS = os.O_PATH | os.O_DIRECTORY


def open_source(mount: Mount, owner: Owner, layout: Layout) -> int:
    """MountRefused when its owner cannot get there, or nobody should."""
    try:
        handle = act_as(owner, lambda: _open_and_enter(mount.source))
    except NotADirectoryError as error:
        raise refusal(mount, "it is not a directory", "Name the directory that it is in.") from error
    except OSError as error:
        who = f"user {owner.uid}"
        raise refusal(
            mount, f"{who} cannot enter it: {error.strerror}", "Name one that this user can enter."
        ) from error
    try:
        _judge(mount, handle, owner, layout)
    except BaseException:
        os.close(handle)
        raise
    return handle


def refusal(mount: Mount, cause: str, hint: str = "") -> MountRefused:
    return MountRefused(f"mount {mount.source}", cause, hint)


def find_path(handle: int) -> str:
    """Where it is now."""
    return os.readlink(f"/proc/self/fd/{handle}")


def _open_and_enter(path: str) -> int:
    handle = open_resolved(AT_FDCWD, path, _FLAGS, NO_MAGICLINKS)
    try:
        os.stat(".", dir_fd=handle)  # to have found it is not to be allowed in
    except BaseException:
        os.close(handle)
        raise
    return handle


def _judge(mount: Mount, handle: int, owner: Owner, layout: Layout) -> None:
    found = os.fstat(handle)
    path = find_path(handle)
    if path == "/" or _is_any_of(found, [Path("/")]):
        raise refusal(mount, "it is the whole machine", "Name the directory that is needed.")
    if any(f"{path}/".startswith(f"{never}/") for never in _NEVER):
        raise refusal(mount, "it is the kernel's", "Name a directory with files.")
    for own in (layout.state, layout.run):
        real = own.resolve()
        if f"{path}/".startswith(f"{real}/") or _is_any_of(found, (real, *real.parents)):
            raise refusal(
                mount, "the daemon's own files are in there", "Name a directory that has nothing to do with it."
            )
    if mount.writable and owner.home:
        home = Path(owner.home)
        if _is_any_of(found, (home, *home.parents)):
            hint = "Name a directory below it, or show it read-only."
            raise refusal(mount, f"the whole home of user {owner.uid} cannot be shown writable", hint)


def _is_any_of(found: os.stat_result, paths: Iterator[Path] | tuple[Path, ...] | list[Path]) -> bool:
    """Also where it has another name, by a mount."""
    for path in paths:
        try:
            if os.path.samestat(found, os.stat(path)):
                return True
        except OSError:
            continue  # it is not there
    return False
