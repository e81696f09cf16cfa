"""The unix socket that the HTTP door listens on, and its permissions."""

from __future__ import annotations

import grp
import os
import socket
from pathlib import Path

GROUP = "k8e"
BACKLOG = 1024


def bind_socket(path: Path) -> socket.socket:
    """Makes a listening socket that only its owner and the group k8e, where there is one, can connect to.

    It gets its name last, so that there is never a socket of that name with other permissions, or that does not listen.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        previous = os.umask(0o177)
        try:
            listener.bind(str(draft))
        finally:
            os.umask(previous)
        open_to_group(draft)
        listener.listen(BACKLOG)
        draft.replace(path)
    except OSError:
        listener.close()
        draft.unlink(missing_ok=True)
        raise
    return listener


def open_to_group(path: Path) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    except (KeyError, PermissionError):
        return  # no such group, or no right to use it: only the owner can connect
    path.chmod(0o660)
