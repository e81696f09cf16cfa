"""Reads the daemon's own files and sets damaged ones aside.

A damaged file costs only what it describes: its reader goes on without it, the file is moved to `damaged/` in the state
directory, and `take` reports the damage once, for the daemon log and the audit log.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "damaged"
KEPT: Final = 100  # files and directories that were set aside; the oldest are removed
_LONGEST: Final = 64 << 20
_TOLD: Final = 1000
# Errors that show damage of the file. Any other error is the machine's (no descriptors, no memory), and a good file
# must not be set aside for it. Root may open every file, so EACCES is the machine's, too.
_OF_THE_FILE: Final = (
    *(errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR),  # a link, a socket, a directory
    *(errno.EIO, errno.EUCLEAN, errno.EBADMSG),  # the disk has lost it
)


class Damaged(ValueError):
    """A file is damaged."""


@dataclass(frozen=True, slots=True)
class Damage:
    path: str
    cause: str
    aside: str  # its new path; empty: it was not moved, or it is gone


def read_own(path: Path) -> bytes:
    """Reads a file that only the daemon may have written. Raises FileNotFoundError, Damaged, or another OSError when
    the machine could not read it."""
    try:
        # O_NONBLOCK: a pipe in its place has no reader, and is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _judge(error, "opened") from error
    try:
        check_own(os.fstat(descriptor))
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise _judge(error, "read") from error
    finally:
        os.close(descriptor)
    if len(content) > _LONGEST:
        raise Damaged("it is far too long")
    return content


def _judge(error: OSError, verb: str) -> Exception:
    return Damaged(f"it cannot be {verb}: {error.strerror}") if error.errno in _OF_THE_FILE else error


def check_file(path: Path) -> None:
    """Does what `check_own` does, but accepts a device: the administrator has configured it, and it is not moved."""
    found = path.lstat()
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        check_own(found)


def check_own(found: os.stat_result, *, directory: bool = False) -> None:
    """Raises Damaged unless only the daemon's user could have written it."""
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(found.st_mode):
        raise Damaged(f"it is no {'directory' if directory else 'regular file'}")
    if found.st_uid != os.geteuid():
        raise Damaged(f"it belongs to user {found.st_uid}")


class Damages:
    """Collects damage and sets files aside. Any thread may call it."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._folder = state / FOLDER
        self._lock = threading.Lock()
        self._told: deque[Damage] = deque(maxlen=_TOLD)

    def set_aside(self, path: Path, cause: object) -> None:
        """Moves a damaged file to `damaged/`. Raises OSError when that is not possible."""
        with self._lock:
            self._make_folder()
            self._put_aside(path, cause)
            with contextlib.suppress(OSError):
                self._forget_old()

    def tell(self, path: Path, cause: object) -> None:
        """Notes a damaged file that stays where it is or was made again."""
        with self._lock:
            self._told.append(Damage(os.fspath(path), str(cause), ""))

    def take(self) -> Sequence[Damage]:
        """Returns the damage found since the last call."""
        with self._lock:
            told = list(self._told)
            self._told.clear()
        return told

    def _make_folder(self) -> None:
        """Makes `damaged/`; a file in its place is the first one set aside."""
        try:
            check_own(self._folder.lstat(), directory=True)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except Damaged as error:
            other = self._folder.with_name(f"{FOLDER}.{os.getpid()}")
            os.rename(self._folder, other)
            self._folder.mkdir(mode=0o700)
            self._put_aside(other, f"it lay in the place of {FOLDER}/: {error}")

    def _put_aside(self, path: Path, cause: object) -> None:
        aside = self._move(path)
        self._told.append(Damage(os.fspath(path), str(cause), os.fspath(aside) if aside else ""))

    def _move(self, path: Path) -> Path | None:
        if path.is_char_device() or path.is_block_device():
            raise OSError(errno.ENOTSUP, "a device is not set aside", os.fspath(path))
        owner = path.parent.name if path.name in _SHARED_NAMES else ""
        stem = "-".join(part for part in (time.strftime("%Y%m%dT%H%M%S"), owner, path.name) if part)
        aside = next(
            found
            for number in itertools.count()
            if not os.path.lexists(found := self._folder / (f"{stem}.{number}" if number else stem))
        )
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if not path.is_relative_to(self._state) or path.is_fifo() or path.is_socket():
                _remove(path)  # below /run, where nothing is worth keeping
                return None
            shutil.move(path, aside)  # the administrator gave a part of the state a disk of its own
        return aside

    def _forget_old(self) -> None:
        with os.scandir(self._folder) as entries:
            found = sorted((entry.name, entry.path) for entry in entries)
        for _, path in found[:-KEPT]:
            _remove(Path(path))


def own_directory(path: Path, mode: int, damages: Damages) -> None:
    """Makes a directory if there is none; sets aside what is in its place. A link of root's to a directory of root's is
    accepted: the administrator put the directory on another disk."""
    try:
        found = path.lstat()
        linked = stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and path.is_dir()
        check_own(path.stat() if linked else found, directory=True)
    except FileNotFoundError:
        pass
    except Damaged as error:
        damages.set_aside(path, error)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)  # whatever the umask is


def list_damaged(state: Path) -> Sequence[str]:
    """Returns the names of the files in `damaged/`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(state / FOLDER))
    return []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# Every sandbox has one of each: the sandbox's name tells them apart.
_SHARED_NAMES: Final = ("sandbox.json", "egress.json", "placeholders.json", "place.json")
