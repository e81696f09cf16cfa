"""The differences between systems, for the commands that also run on macOS and Windows (standalone/)."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Flags that a system does not have say nothing there. Windows would change line ends without the last.
NOFOLLOW, DIRECTORY, CLOEXEC, NONBLOCK, NOCTTY, BINARY = (
    int(getattr(os, f"O_{name}", 0)) for name in ("NOFOLLOW", "DIRECTORY", "CLOEXEC", "NONBLOCK", "NOCTTY", "BINARY")
)
# Whether directories can be opened, and names be used below an open one.
has_folder_handles = os.open in os.supports_dir_fd and os.scandir in os.supports_fd


def find_user() -> int:
    """The user's number; -1 where users have none."""
    return int(getattr(os, "geteuid", lambda: -1)())


def lock_folder(path: str) -> int:
    """Waits for its turn, and returns a descriptor: closing it ends the turn."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        windows: Any = msvcrt
        descriptor = os.open(os.path.join(path, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        windows.locking(descriptor, windows.LK_LOCK, 1)
        return descriptor
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def use_bytes() -> None:
    """Standard streams carry bytes as they are: Windows changes line ends otherwise."""
    if BINARY:
        import msvcrt

        windows: Any = msvcrt
        for descriptor in (0, 1, 2):
            windows.setmode(descriptor, BINARY)
