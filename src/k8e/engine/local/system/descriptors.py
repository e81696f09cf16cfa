"""Descriptors that are closed at the end of a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
PATH: Final = os.O_PATH | os.O_NOFOLLOW  # names a file or directory without opening it
PATH_OF_DIRECTORY: Final = PATH | os.O_DIRECTORY


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened(
    path: str | Path, flags: int, *, folder: int | None = None, mode: int = 0o600
) -> contextlib.AbstractContextManager[int]:
    """Opens a file, below `folder` if one is given. Programs that are started meanwhile do not inherit it."""
    return closing(os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=folder))
