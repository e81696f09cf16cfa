"""Files below a root that is not trusted: an image's, or one in which a sandbox has run.

The kernel resolves every path with that directory as `/`, so a link leads to where it would lead inside and never out
(openat2, RESOLVE_IN_ROOT). A file that is written replaces what had its name; a link there is not followed. Nothing
runs below that root meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from k8e.engine.local.system.calls import (
    DIRECTORY,
    PATH_OF_DIRECTORY,
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    closing,
    openat2,
)


class RootFiles:
    """`first_id`: the machine's id for the sandbox's root; owners are given as the sandbox knows them."""

    def __init__(self, root: Path, first_id: int | None = None) -> None:
        self._first = first_id or 0
        self._root = os.open(root, PATH_OF_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> RootFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._root)

    def read(self, path: str, limit: int) -> bytes | None:
        """Returns the content of a regular file of at most that many bytes; None for everything else."""
        try:
            found = self._open(path, os.O_PATH)
        except OSError:
            return None
        with closing(found):
            # Checked before it is opened: to open a device or a FIFO has effects.
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                return None
            with open(f"/proc/self/fd/{found}", "rb") as file:
                content = file.read(limit + 1)
        return content if len(content) <= limit else None

    def is_folder(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            os.close(self._open(path, os.O_PATH | os.O_DIRECTORY))
            return True
        return False

    def write(self, path: str, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        """Writes a new file, in a directory that is made if there is none."""
        parent, _, name = path.rpartition("/")
        with closing(self._make(parent)) as folder:
            self._clear(folder, name)
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            with open(handle, "wb") as file:
                file.write(content)
                self._own(handle, mode, owner)

    def make_folder(self, path: str, *, mode: int = 0o755, owner: tuple[int, int] = (0, 0)) -> None:
        """Makes a directory with its parents. One that is there stays as it is."""
        os.close(self._make(path, mode, owner))

    def make_point(self, name: str, *, mode: int = 0o755, owner: tuple[int, int] = (0, 0), file: bool = False) -> None:
        """Makes a directory or file at the top, which is no link, for a mount to be laid over."""
        with contextlib.suppress(FileNotFoundError):
            kind = os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode
            if stat.S_ISREG(kind) if file else stat.S_ISDIR(kind):
                return
            self._clear(self._root, name)
        if file:
            self.write(name, b"", mode=mode, owner=owner)
        else:
            os.close(self._make_one(self._root, name, mode, owner))

    def give(self, path: str, owner: tuple[int, int], mode: int) -> None:
        """Sets the owner and mode of a directory."""
        with closing(self._open(path, os.O_RDONLY | os.O_DIRECTORY)) as handle:
            self._own(handle, mode, owner)

    def _make(self, path: str, mode: int = 0o755, owner: tuple[int, int] = (0, 0)) -> int:
        """Returns the directory, open. A file of its name is removed."""
        path = path.rstrip("/")
        try:
            return self._open(path or "/", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) or not path:
                raise
        parent, _, name = path.rpartition("/")
        with closing(self._make(parent)) as folder:
            self._clear(folder, name)
            return self._make_one(folder, name, mode, owner)

    def _make_one(self, folder: int, name: str, mode: int, owner: tuple[int, int]) -> int:
        os.mkdir(name, 0o700, dir_fd=folder)
        handle = os.open(name, DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            self._own(handle, mode, owner)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _own(self, handle: int, mode: int, owner: tuple[int, int]) -> None:
        os.fchown(handle, self._first + owner[0], self._first + owner[1])
        os.fchmod(handle, mode)  # whatever the umask is

    @staticmethod
    def _clear(folder: int, name: str) -> None:
        """Removes what has the name; of directories only an empty one."""
        if name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "not the name of a file", name)
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=folder)

    def _open(self, path: str, flags: int) -> int:
        return openat2(self._root, path, flags, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
