"""One sandbox's workspace in another: the same files, live in both directions.

Each native sandbox has host ids of its own, so the second one sees the files through an id-mapped mount: what belongs
to uid 1000 of the one belongs to uid 1000 of the other. The mount is the second one's: it is below its directory, and
holds the first one's disk for as long as it lives, also when the first one is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.mounts.kernel import NODEV, NOSUID, Span, attach_mount, change_mount, clone_mount, id_map
from k8e.engine.local.mounts.view import make_mount_point
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import ID_COUNT


def share_workspace(owner: SandboxPaths, guest: SandboxPaths, guest_first: int | None) -> Path:
    """Mounts the owner's workspace below the guest's directory. Returns where."""
    target = make_mount_point(guest, "workspace")
    try:
        owner_first = Record.load(owner.record).first_id or 0
        workspace = os.open(owner.workspace, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, ValueError) as error:
        raise EngineError("shared workspace", f"{owner.top.name} has none any more") from error
    try:
        mount = clone_mount(workspace, NOSUID | NODEV)
    finally:
        os.close(workspace)
    try:
        _shift_ids(mount, owner_first, guest_first or 0)
        attach_mount(mount, target)
    finally:
        os.close(mount)
    return target


def find_sources(owner: SandboxPaths) -> tuple[int, ...]:
    """What the owner is shown of the machine: who shares its workspace is shown the same."""
    try:
        return Record.load(owner.record).sources
    except (FileNotFoundError, ValueError) as error:
        raise EngineError("shared workspace", f"{owner.top.name} is not there any more") from error


def _shift_ids(mount: int, stored: int, shown: int) -> None:
    if stored == shown:
        return
    try:
        with id_map([Span(stored, shown, ID_COUNT)]) as namespace:
            change_mount(mount, 0, namespace=namespace)
    except OSError as error:
        cause = f"the owners of its files cannot be mapped to this sandbox's: {error}"
        raise EngineError("shared workspace", cause, "id-mapped mounts of ext4 need Linux 5.12 or later") from error
