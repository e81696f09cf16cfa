"""Detached mounts: clones that are attached nowhere until they are complete, and may show files as another range of
owners.

A detached mount is a descriptor and gone with it, so a daemon that is killed between two calls leaves none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e.engine.local.system.calls import mount_setattr, new_user_namespace, open_tree, opened


@dataclass(frozen=True, slots=True)
class IdMapping:
    """`count` ids from `stored` on, as files have them, are shown as those from `shown` on."""

    stored: int
    shown: int
    count: int


@contextlib.contextmanager
def cloned(source: Path | int, attributes: int = 0, *, recursive: bool = False) -> Iterator[int]:
    """A private clone of the mount at a path, or open as a descriptor, until the end of the block."""
    tree = open_tree(source, recursive=recursive)
    try:
        mount_setattr(tree, attributes, recursive=recursive)
        yield tree
    finally:
        os.close(tree)


def map_ids(tree: int, users: Sequence[IdMapping], groups: Sequence[IdMapping] | None = None) -> None:
    """Shows the owners of a detached mount's files in other ranges. Without `groups`, groups are mapped like users.

    The kernel takes the mapping from a user namespace, and a namespace needs a process to begin with.
    """
    with new_user_namespace() as pid:
        for name, ranges in (("uid_map", users), ("gid_map", users if groups is None else groups)):
            lines = "".join(f"{each.stored} {each.shown} {each.count}\n" for each in ranges)
            with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
                file.write(lines.encode())
        with opened(f"/proc/{pid}/ns/user", os.O_RDONLY) as namespace:
            mount_setattr(tree, 0, user_namespace=namespace)
