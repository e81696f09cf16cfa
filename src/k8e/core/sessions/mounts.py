"""Checks which directories of the machine a caller may have in a sandbox, and where. Pure.

Whether a directory exists and whose it is, is for the engine to find out, with the rights of the user who asks. Here it
is decided who may ask at all, and for what in a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from k8e.core.checks import MAX_PATH, encode, refuse
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller
from k8e.engine import WHOLE, Mount, Shape

MAX_MOUNTS: Final = 8
MAX_KEPT: Final = 64  # parts of a mount; each step to one is a mount of its own
MAX_HIDDEN: Final = 256
MAX_STEPS: Final = 16
MAX_PART: Final = 1024  # bytes of the name of one
_WORKSPACE: Final = "/workspace"
_HOME: Final = "/home/user"
# First steps of paths at which a sandbox has directories of its own.
_OURS: Final = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/run", "/sbin", "/sys", "/usr", "/workspace"),
)


def check_shape(caller: Caller, shape: Shape) -> Shape:
    """The shape with the caller as the owner of its mounts: they show what the caller can read on the machine."""
    if shape.slots:
        refuse("slots", "are of sandboxes that are made ahead")
    if not shape.mounts:
        return shape
    _check_caller("mounts", caller, len(shape.mounts))
    mounts = tuple(_check_mount(f"mounts[{index}]", mount, caller) for index, mount in enumerate(shape.mounts))
    _check_apart("mounts", [mount.target for mount in mounts])
    return replace(shape, mounts=mounts)


def check_slots(caller: Caller, shape: Shape) -> None:
    """A warm sandbox has slots instead of mounts: whose directories they take is known only when it is claimed."""
    if shape.mounts:
        refuse("mounts", "cannot be made ahead", "Say in `slots` where they will be.")
    if shape.slots:
        _check_caller("slots", caller, len(shape.slots))
        for index, target in enumerate(shape.slots):
            _check_target(f"slots[{index}]", target)
        _check_apart("slots", shape.slots)


def _check_caller(field: str, caller: Caller, count: int) -> None:
    if caller.uid == REMOTE:
        raise Fault(
            Kind.DENIED,
            "mounts_denied",
            "directories of the machine are shown to its own users only",
            field=field,
            hint="Copy what is needed into the session's workspace, or have a manifest fetch it.",
        )
    if count > MAX_MOUNTS:
        refuse(field, f"has {count} entries, the limit is {MAX_MOUNTS}")


def _check_mount(field: str, mount: Mount, caller: Caller) -> Mount:
    _check_absolute(f"{field}.source", mount.source)
    _check_target(f"{field}.target", mount.target, free=mount.target == mount.source or mount.private == (WHOLE,))
    _check_parts(f"{field}.kept", mount.kept, MAX_KEPT)
    _check_parts(f"{field}.hidden", mount.hidden, MAX_HIDDEN)
    _check_private(f"{field}.private", mount)
    if mount.hidden and mount.writable:
        hint = "Show it read-only, or show only those directories in it that may be seen."
        refuse(f"{field}.hidden", "what can be written to has nothing that is hidden", hint)
    return replace(mount, owner=caller.uid)


def _check_private(field: str, mount: Mount) -> None:
    if mount.private == (WHOLE,):
        if mount.writable or mount.hidden:
            refuse(field, "all of a mount is private only where nothing of it is writable or hidden")
    elif mount.private and not (mount.writable and set(mount.private) <= set(mount.kept)):
        refuse(field, "a private part is one of the kept parts of a writable mount")


def _check_target(field: str, target: str, *, free: bool = False) -> None:
    """`free`: it may also be outside of the workspace. A directory at its own path is, and a copy: a repository knows
    its parts by absolute paths."""
    _check_absolute(field, target)
    if target in (_WORKSPACE, _HOME) or target.startswith(f"{_HOME}/"):
        return
    if not free or target.count("/") < 2 or f"/{target.split('/')[1]}" in _OURS:
        others = "or, of a copy or at the source's own path, outside of the system"
        refuse(field, f"must be {_WORKSPACE}, {_HOME} or below {_HOME}, {others}")


def _check_absolute(field: str, value: object) -> None:
    path = encode(field, value)
    if not path.startswith(b"/"):
        refuse(field, "must be an absolute path")
    if len(path) > MAX_PATH:
        refuse(field, f"is longer than {MAX_PATH} bytes")
    if path != b"/" and not _is_plain(path[1:]):
        refuse(field, "must be a path without . and .. and without empty parts")


def _check_parts(field: str, parts: Sequence[object], most: int) -> None:
    if len(parts) > most:
        refuse(field, f"has {len(parts)} entries, the limit is {most}")
    for index, part in enumerate(parts):
        path = encode(f"{field}[{index}]", part)
        if len(path) > MAX_PART:
            refuse(f"{field}[{index}]", f"is longer than {MAX_PART} bytes")
        if path.count(b"/") >= MAX_STEPS:
            refuse(f"{field}[{index}]", f"has more than {MAX_STEPS} steps")
        if not _is_plain(path):
            refuse(f"{field}[{index}]", "must be a relative path without . and .. and without empty parts")


def _is_plain(path: bytes) -> bool:
    return not {b"", b".", b".."} & set(path.split(b"/"))


def _check_apart(field: str, targets: Iterable[str]) -> None:
    seen: list[str] = []
    for index, target in enumerate(targets):
        for other in seen:
            if f"{target}/".startswith(f"{other}/") or f"{other}/".startswith(f"{target}/"):
                where = f"{field}[{index}]" + (".target" if field == "mounts" else "")
                refuse(where, f"{target} and {other} lie in one another")
        seen.append(target)
