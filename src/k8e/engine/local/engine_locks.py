"""The engines on this machine: a lock file for each, locked as long as a process has the engine.

What an engine leaves when it dies is found through its state directory. When no engine will ever be started there again
(a test that was killed, a directory that was removed), `k8e doctor --fix` still finds it by this file, and knows by the
lock that another one is alive. Below /run, as everything that it stands for is gone with a reboot.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from k8e.damage import Damaged, Damages, check_own
from k8e.engine.local.layout import Layout

ENGINES = Path("/run/k8e-engines")


class EngineLock:
    """The lock of one engine. Several engines of one directory share it."""

    def __init__(self, layout: Layout, folder: Path = ENGINES, damages: Damages | None = None) -> None:
        self._layout = layout
        self._damages = damages or Damages(layout.state)
        self._folder = folder
        self._handle = -1

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def take(self) -> None:
        """Called before anything is made. A process that may not write there can make nothing either."""
        while self._handle < 0:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except PermissionError:
                return
            path = self._folder / self._layout.tag
            with contextlib.suppress(FileNotFoundError):
                try:
                    check_own(path.lstat())
                except Damaged as error:
                    self._damages.set_aside(path, error)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            if not _is(path, handle):  # its last user was just removing it
                os.close(handle)
                continue
            self._handle = handle
            note = {"state": os.fspath(self._layout.state), "run": os.fspath(self._layout.run)}
            os.pwrite(handle, json.dumps(note).encode(), 0)

    def release(self) -> None:
        """Called when nothing of the engine is left."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with contextlib.suppress(BlockingIOError):  # another engine still has it
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self._folder / self._layout.tag).unlink(missing_ok=True)
            os.close(handle)


@contextlib.contextmanager
def dead_engine(tag: str, folder: Path = ENGINES) -> Iterator[Layout | None]:
    """Yields the layout of an engine that no process has; None while one does. Until the end of the block no other
    process takes it for dead."""
    try:
        check_own((folder / tag).lstat())
        handle = os.open(folder / tag, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, Damaged):  # an engine that starts there sets aside what is no file of ours
        yield None
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        layout = _read(handle)
        if layout is None or layout.tag != tag:
            # Killed before it had written a word, and so before it had made anything.
            (folder / tag).unlink(missing_ok=True)
            yield None
            return
        fcntl.flock(handle, fcntl.LOCK_SH)  # an engine of ours is about to clear it away
        yield layout
    finally:
        os.close(handle)


def known_engines(folder: Path = ENGINES) -> list[str]:
    """Lists the tags of engines, dead or alive."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def _read(handle: int) -> Layout | None:
    try:
        note = json.loads(os.pread(handle, 65536, 0))
        return Layout(Path(note["state"]), Path(note["run"]))
    except (ValueError, LookupError, TypeError):
        return None


def _is(path: Path, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(handle))
    return False
