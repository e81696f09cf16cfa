"""Kept parts of a directory that do not exist: a project without .git, in which code could put a .git whose hooks the
machine's git would run.

What is not there cannot be mounted over. So an empty directory takes its place for as long as the sandbox lives, made
and removed with the owner's rights, and only if it is empty and has our mark. Which ones there are is noted before they
are made, so that destroying finds them after any crash; one that two sandboxes need is noted by both, and goes with the
second.
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
from k8e.engine.local.mounts.kernel import AT_FDCWD, NO_MAGICLINKS, open_resolved
from k8e.engine.local.mounts.owner import Owner, act_as, find_owner

MARK = "user.k8e.placeholder"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_turn = threading.Lock()  # one sandbox's must not be removed while another begins to count on it


@contextlib.contextmanager
def stand_in(mount: Mount, owner: Owner, source: int, paths: SandboxPaths) -> Iterator[Mount]:
    """The mount with kept parts that all exist while this lasts: after that, those that are mounted over stay."""
    with _turn, contextlib.ExitStack() as opened:
        found = {look.part: look for look in [_look(owner, source, part, opened) for part in mount.kept]}
        _note(paths, mount, [look.part for look in found.values() if look.ours or look.missing_in >= 0])
        missing = [look for look in found.values() if look.missing_in >= 0]
        made = act_as(owner, lambda: [_make(look) for look in missing]) if missing else []
        left_out = {look.part for look, there in zip(missing, made, strict=True) if not there}
        yield replace(mount, kept=tuple(part for part in found if part not in left_out))


def remove_placeholders(paths: SandboxPaths, damages: Damages) -> None:
    """When nothing is mounted there any more. What is noted in a damaged file stays in the project, empty."""
    with _turn:
        try:
            notes = _read_notes(paths)
        except Damaged as error:
            damages.set_aside(paths.placeholders, error)
            return
        for source, uid, part in notes:
            with contextlib.suppress(OSError):  # it was moved, filled, removed, or another sandbox still needs it
                act_as(find_owner(uid), lambda source=source, part=part: _remove(source, part))  # type: ignore[misc]
        paths.placeholders.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Look:
    part: str  # what is to be kept: the part that was asked for, or the first step to it that is missing
    missing_in: int = -1  # then: the directory that it is to be made in, open
    ours: bool = False  # another sandbox made it


def _look(owner: Owner, source: int, part: str, opened: contextlib.ExitStack) -> _Look:
    steps = part.split("/")
    parent = source
    try:
        for index, step in enumerate(steps):
            so_far = "/".join(steps[: index + 1])
            try:
                found = os.open(step, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            except FileNotFoundError:
                return _Look(so_far, missing_in=parent)
            opened.callback(os.close, found)
            parent = found
            if act_as(owner, lambda found=found: _is_ours(found)):  # type: ignore[misc]
                return _Look(so_far, ours=True)
    except NotADirectoryError:
        pass  # a file or a link is on the way: see keeping.py
    return _Look(part)


def _make(look: _Look) -> bool:
    """As its owner. False when that one may not, and so nobody inside."""
    name = look.part.rpartition("/")[2]
    try:
        os.mkdir(name, 0o755, dir_fd=look.missing_in)
        handle = os.open(name, _FOLDER, dir_fd=look.missing_in)
        try:
            os.setxattr(handle, MARK, b"")
        except OSError:
            os.rmdir(name, dir_fd=look.missing_in)
            raise
        finally:
            os.close(handle)
    except PermissionError:
        return False
    return True


def _is_ours(found: int) -> bool:
    try:
        handle = os.open(".", _FOLDER, dir_fd=found)
    except OSError:
        return False
    try:
        return not os.listdir(handle) and os.getxattr(handle, MARK) == b""
    except OSError:
        return False
    finally:
        os.close(handle)


def _remove(source: str, part: str) -> None:
    parent = open_resolved(AT_FDCWD, source, os.O_PATH | os.O_DIRECTORY, NO_MAGICLINKS)
    try:
        *steps, name = part.split("/")
        for step in steps:
            found = os.open(step, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            os.close(parent)
            parent = found
        handle = os.open(name, _FOLDER, dir_fd=parent)
        try:
            ours = _is_ours(handle)
        finally:
            os.close(handle)
        if ours:
            os.rmdir(name, dir_fd=parent)
    finally:
        os.close(parent)


def _note(paths: SandboxPaths, mount: Mount, parts: Sequence[str]) -> None:
    """All in one go: a file that replaces another is written out by some filesystems before they go on."""
    if not parts:
        return
    noted = [*_read_notes(paths), *((mount.source, mount.owner, part) for part in parts)]
    partial = paths.placeholders.with_suffix(".new")
    partial.write_text(json.dumps(noted))
    partial.rename(paths.placeholders)


def _read_notes(paths: SandboxPaths) -> list[tuple[str, int, str]]:
    try:
        notes = json.loads(read_own(paths.placeholders))
        if not all([type(value) for value in note] == [str, int, str] for note in notes):
            raise Damaged("it is no list of placeholders")
        return [(source, uid, part) for source, uid, part in notes]
    except FileNotFoundError:
        return []
    except Damaged:
        raise
    except (ValueError, TypeError) as error:
        raise Damaged(f"it is no list of placeholders: {error}") from error
