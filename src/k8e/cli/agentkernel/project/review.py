"""Finds files below a project that a command made and that programs of the machine obey when the user merely enters
the directory: a repository, a .envrc, an editor's tasks. Unlike at the top of the project, the sandbox cannot be kept
from making them; so the user is warned.

New and changed files are known by their change time, which the kernel sets and no command inside can choose. All of
them were written by the sandbox: no link is followed, and names are cleaned before they are shown (output.py).
"""

from __future__ import annotations

import os

from k8e.cli.agentkernel.project.files import open_below
from k8e.cli.transfer.destination import FOLDER
from k8e.profiles.protection import KEPT, is_repository

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 100_000  # names that are looked at and folders that are opened, those nearest to the top first
_SLACK = 0.02  # seconds by which the clock of files may be behind
_NAMES = frozenset(KEPT)


def find_nested(top: str, since: float) -> tuple[list[str], bool]:
    """Returns the paths below `top`, without those directly in it, and whether everything was looked at."""
    found: list[str] = []
    waiting, left = [""], MOST
    for place in waiting:  # which grows meanwhile
        left -= place.count("/")  # as many as are on the way
        if left < 0:
            return sorted(found), False
        try:
            folder = open_below(top, place.split("/")[:-1])
        except OSError:
            continue  # gone, or closed to its own user, and so to the user's programs
        try:
            names, folders = _list(folder)
            left -= len(names)
            waiting += [f"{place}{name}/" for name in folders if name not in _NAMES]
            if place:
                changed = (name for name in sorted(_NAMES & names) if _is_changed(folder, name, since))
                found += [place + name for name in changed]
                if is_repository(names) and any(_is_changed(folder, name, since) for name in ("config", "HEAD")):
                    found.append(f"{place}HEAD")
        finally:
            os.close(folder)
    return sorted(found), True


def _list(folder: int) -> tuple[frozenset[str], list[str]]:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    return frozenset(name for name, _ in found), [name for name, is_folder in found if is_folder]


def _is_changed(parent: int, name: str, since: float) -> bool:
    """Whether the file, or what is directly in the directory, or a hook has changed."""
    return any(changed >= since - _SLACK for changed in _changes(parent, name, ("hooks",)))


def _changes(parent: int, name: str, deeper: tuple[str, ...]) -> Iterator[float]:
    try:
        yield os.stat(name, dir_fd=parent, follow_symlinks=False).st_ctime
        folder = os.open(name, FOLDER, dir_fd=parent)
    except OSError:
        return  # not there, or no folder
    try:
        names, _ = _list(folder)
        for each in names:
            yield from _changes(folder, each, ()) if each in deeper else [_change(folder, each)]
    finally:
        os.close(folder)


def _change(parent: int, name: str) -> float:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_ctime
    except OSError:
        return 0.0
