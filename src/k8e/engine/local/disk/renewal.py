"""A folder that was in a sandbox's hands, made new for its next start.

Whoever was root in there may have left anything: links that lead out of it, folders a thousand deep, pipes. Nothing of
it runs now, so nothing changes under our hands. Still nothing is followed, nothing is waited for, no depth is too deep.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def empty_folder(path: Path, owner: int) -> None:
    """As it was at first: empty, root's of the sandbox, closed to everybody else in there. Made if it is not there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    with _opened(os.fspath(path), _FOLDER) as folder:
        while names := os.listdir(folder):
            for name in names:
                _remove(folder, name)
        os.fchown(folder, owner, owner)
        os.fchmod(folder, 0o700)


def _remove(folder: int, name: str) -> None:
    """A folder's content is moved up first: however deep it is, two descriptors are enough."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    with _opened(name, _FOLDER, folder) as below:
        for each in os.listdir(below):
            os.rename(each, secrets.token_hex(16), src_dir_fd=below, dst_dir_fd=folder)
    os.rmdir(name, dir_fd=folder)
