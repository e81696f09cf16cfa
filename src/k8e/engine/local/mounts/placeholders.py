"""Placeholders for kept parts that do not exist: in a project without .git a program could make a .git whose hooks the
machine's git would run.

A name that does not exist cannot be mounted over. So an empty directory takes its place for as long as the sandbox
lives, made and removed with the owner's rights, and removed only if it is empty and has our mark. They are recorded
before they are made, so that `destroy` finds them after any crash; one that two sandboxes need is recorded by both, and
goes with the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from k8e.damage import Damaged, Damages, read_own
from k8e.engine import Mount
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.mounts.source import Owner, act_as, find_owner
from k8e.engine.local.system.calls import (
    AT_FDCWD,
    DIRECTORY,
    PATH,
    PATH_OF_DIRECTORY,
    RESOLVE_NO_MAGICLINKS,
    openat2,
    opened,
)

MARK = "user.k8e.placeholder"
_lock = threading.Lock()  # one sandbox's must not be removed while another begins to count on it


@contextlib.contextmanager
def placeholders(mount: Mount, owner: Owner, source: int, paths: SandboxPaths) -> Iterator[Mount]:
    """Makes them. Yields the mount with kept parts that all exist until the end of the block: after it, those that are
    mounted over stay."""
    with _lock, contextlib.ExitStack() as files:
        found = {part.name: part for part in [_find_part(owner, source, name, files) for name in mount.kept]}
        missing = [part for part in found.values() if part.missing_in >= 0]
        _save(paths, mount, [part.name for part in found.values() if part.ours or part in missing])
        made = act_as(owner, lambda: [_make(part) for part in missing]) if missing else []
        refused = {part.name for part, done in zip(missing, made, strict=True) if not done}
        yield replace(mount, kept=tuple(name for name in found if name not in refused))


def remove_placeholders(paths: SandboxPaths, damages: Damages) -> None:
    """Called when nothing is mounted there any more. Those of a damaged record stay in the project, empty."""
    with _lock:
        try:
            recorded = _load(paths)
        except Damaged as error:
            damages.set_aside(paths.placeholders, error)
            return
        for source, uid, name in recorded:
            with contextlib.suppress(OSError):  # it was moved, filled, removed, or another sandbox still needs it
                act_as(find_owner(uid), lambda source=source, name=name: _remove(source, name))  # type: ignore[misc]
        paths.placeholders.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Part:
    name: str  # the part that was asked for, or the first step to it that is missing
    missing_in: int = -1  # the directory in which it is to be made, open
    ours: bool = False  # another sandbox made it


def _find_part(owner: Owner, source: int, name: str, files: contextlib.ExitStack) -> _Part:
    steps = name.split("/")
    parent = source
    with contextlib.suppress(NotADirectoryError):  # a file or a link is on the way: see kept_parts.py
        for index, step in enumerate(steps):
            so_far = "/".join(steps[: index + 1])
            try:
                parent = files.enter_context(opened(step, PATH, folder=parent))
            except FileNotFoundError:
                return _Part(so_far, missing_in=parent)
            if act_as(owner, lambda found=parent: _is_ours(found)):  # type: ignore[misc]
                return _Part(so_far, ours=True)
    return _Part(name)


def _make(part: _Part) -> bool:
    """Called with the owner's rights. False when they do not suffice, and so do not inside either."""
    name = part.name.rpartition("/")[2]
    try:
        os.mkdir(name, 0o755, dir_fd=part.missing_in)
        with opened(name, DIRECTORY, folder=part.missing_in) as handle:
            try:
                os.setxattr(handle, MARK, b"")
            except OSError:
                os.rmdir(name, dir_fd=part.missing_in)
                raise
    except PermissionError:
        return False
    return True


def _is_ours(found: int) -> bool:
    try:
        with opened(".", DIRECTORY, folder=found) as handle:
            return not os.listdir(handle) and os.getxattr(handle, MARK) == b""
    except OSError:
        return False


def _remove(source: str, name: str) -> None:
    *steps, last = name.split("/")
    with contextlib.ExitStack() as files:
        parent = openat2(AT_FDCWD, source, os.O_PATH | os.O_DIRECTORY, RESOLVE_NO_MAGICLINKS)
        files.callback(os.close, parent)
        for step in steps:
            parent = files.enter_context(opened(step, PATH_OF_DIRECTORY, folder=parent))
        if _is_ours(files.enter_context(opened(last, DIRECTORY, folder=parent))):
            os.rmdir(last, dir_fd=parent)


def _save(paths: SandboxPaths, mount: Mount, names: Sequence[str]) -> None:
    """Writes all in one go: a file that replaces another is written out by some filesystems before they go on."""
    if not names:
        return
    recorded = [*_load(paths), *((mount.source, mount.owner, name) for name in names)]
    partial = paths.placeholders.with_suffix(".new")
    partial.write_text(json.dumps(recorded))
    partial.rename(paths.placeholders)


def _load(paths: SandboxPaths) -> list[tuple[str, int, str]]:
    try:
        recorded = json.loads(read_own(paths.placeholders))
        if not all([type(value) for value in each] == [str, int, str] for each in recorded):
            raise Damaged("it is no list of placeholders")
        return [(source, uid, name) for source, uid, name in recorded]
    except FileNotFoundError:
        return []
    except Damaged:
        raise
    except (ValueError, TypeError) as error:
        raise Damaged(f"it is no list of placeholders: {error}") from error
