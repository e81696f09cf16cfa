"""One sandbox's workspace in another: the same files, live in both directions.

Each native sandbox has ids of its own on the machine, so the child sees the files through an id-mapped mount: what
belongs to uid 1000 of the parent belongs to uid 1000 of the child. The mount is the child's: it is below its directory,
and holds the parent's disk for as long as the child lives, also when the parent is gone.
"""

from __future__ import annotations

from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.mounts.detached import IdMapping, cloned, map_ids
from k8e.engine.local.mounts.mounts import make_mount_point
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import ID_COUNT
from k8e.engine.local.system.calls import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, PATH_OF_DIRECTORY, move_mount, opened

_CONTROL = "shared workspace"


def load_parent(parent: SandboxPaths) -> Record:
    try:
        return Record.load(parent.record)
    except (FileNotFoundError, ValueError) as error:
        raise EngineError(_CONTROL, f"{parent.top.name} is not there any more") from error


def share_workspace(parent: SandboxPaths, child: SandboxPaths, child_first: int | None) -> Path:
    """Mounts the parent's workspace below the child's directory. Returns where."""
    target = make_mount_point(child, "workspace")
    parent_first = load_parent(parent).first_id or 0
    try:
        with (
            opened(parent.workspace, PATH_OF_DIRECTORY) as workspace,
            cloned(workspace, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) as tree,
        ):
            _shift_ids(tree, parent_first, child_first or 0)
            move_mount(tree, target)
    except FileNotFoundError as error:
        raise EngineError(_CONTROL, f"{parent.top.name} has no workspace any more") from error
    return target


def _shift_ids(tree: int, stored: int, shown: int) -> None:
    if stored == shown:
        return
    try:
        map_ids(tree, [IdMapping(stored, shown, ID_COUNT)])
    except OSError as error:
        cause = f"the owners of its files cannot be mapped to this sandbox's: {error}"
        raise EngineError(_CONTROL, cause, "id-mapped mounts of ext4 need Linux 5.12 or later") from error
