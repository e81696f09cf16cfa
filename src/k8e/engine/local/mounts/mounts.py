"""Mounts directories of the machine for a sandbox, below its own directory: one mount for each directory
that was asked for, with the owners of files as the sandbox is to see them.

Owners: the machine's user is the sandbox's default user, in both directions, and this user's other groups have numbers
of their own. No other id is mapped: files of other owners belong to the kernel's overflow id, can be read where all
users can read them, and cannot be changed from inside, not by root either, whom the mount does not know. With gVisor,
root of the machine makes files and gives them to their owners right after; there root of the sandbox stands for an id
that no user has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from k8e.engine import WHOLE, EngineError, Mount
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.detached import IdMapping, cloned, map_ids
from k8e.engine.local.mounts.kept_parts import keep_parts
from k8e.engine.local.mounts.placeholders import placeholders
from k8e.engine.local.mounts.private_parts import mount_whole
from k8e.engine.local.mounts.source import Owner, find_owner, open_source, refusal
from k8e.engine.local.mounts.veil import mount_veil, resolve_hidden
from k8e.engine.local.record import Record
from k8e.engine.local.runtime.bundle import ID_COUNT, Bind
from k8e.engine.local.system.calls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    PATH_OF_DIRECTORY,
    mount_setattr,
    move_mount,
    opened,
)
from k8e.link.model import Identity

UNUSED_ID = 0x2FFF0000  # below the ids of native sandboxes, above those of users
_FIRST_GROUP = 60_000  # inside, of the groups that the machine's user is in besides the first
_CONTROL = "shared workspace"


def attach_mounts(
    mounts: Sequence[Mount],
    layout: Layout,
    paths: SandboxPaths,
    first_id: int | None,
    user: Identity,
    known: Sequence[int] = (),
    *,
    empty: bool = False,
) -> tuple[list[Bind], tuple[int, ...]]:
    """Mounts the directories below the sandbox's own. `user`: the sandbox's default user; `known`: the inodes of the
    sources when they were first mounted, which have to be the same now; `empty`: private parts have nothing of the
    machine's. Returns the inodes, too. Raises MountRefused
    when one of the directories must not be seen."""
    binds: list[Bind] = []
    found: list[int] = []
    for index, mount in enumerate(mounts):
        owner = find_owner(mount.owner)
        with open_source(mount, owner, layout) as source:
            try:
                found.append(os.fstat(source).st_ino)  # without the device, whose number may change with a reboot
                if known and found != list(known[: index + 1]):
                    raise refusal(mount, "another directory is there by now than when it was first shown")
                binds += _attach(mount, owner, source, paths, f"mount-{index}", first_id, user, empty=empty)
            except OSError as error:
                raise EngineError(f"mount {mount.source}", str(error)) from error
    return binds, tuple(found)


def make_mount_point(paths: SandboxPaths, name: str) -> Path:
    paths.mounts.mkdir(mode=0o711, exist_ok=True)
    paths.mounts.chmod(0o711)  # whatever the umask is: root of a native sandbox is an unknown user here
    target = paths.mounts / name
    target.mkdir(mode=0o755, exist_ok=True)
    return target


def seal_mounts(paths: SandboxPaths) -> None:
    """Makes them read-only on the machine, where they have to stay (see kept_parts.py): the sandbox has its own copies
    by now, and the daemon must never remove a user's project together with a directory of its own."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(paths.mounts):
            with opened(paths.mounts / name, PATH_OF_DIRECTORY) as handle:
                mount_setattr(handle, MOUNT_ATTR_RDONLY, recursive=True)


def _attach(
    mount: Mount,
    owner: Owner,
    source: int,
    paths: SandboxPaths,
    name: str,
    first_id: int | None,
    user: Identity,
    *,
    empty: bool,
) -> Iterator[Bind]:
    target = make_mount_point(paths, name)
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if mount.writable else MOUNT_ATTR_RDONLY)
    with cloned(source, attributes) as tree:
        _map_owners(mount, tree, owner, first_id, user)
        if mount.hidden:
            veil = paths.veils / name
            shutil.rmtree(veil, ignore_errors=True)  # of the last time, if it was stopped
            veil.mkdir(parents=True)
            hidden = resolve_hidden(mount, source, owner)
            mount_veil(tree, hidden, veil, make_mount_point(paths, f"{name}-below"), target)
        elif WHOLE in mount.private:
            mount_whole(tree, paths.private / name, make_mount_point(paths, f"{name}-below"), target, empty=empty)
        else:
            move_mount(tree, target)
        yield Bind(os.fspath(target), mount.target, mount.writable or WHOLE in mount.private, whole=True)
        if not mount.writable:  # nothing of it can be changed: only what must not be seen is covered
            mount = replace(mount, kept=tuple(part for part in mount.private if part != WHOLE))
        if mount.kept:
            with placeholders(mount, owner, source, paths) as complete:
                parts = list(keep_parts(complete, tree, paths.private / name, empty=empty))
            if first_id is None:
                # gVisor's kernel has to know the mount points: it does not ask the machine's before a rename.
                for part, writable in parts:
                    yield Bind(os.fspath(target / part), f"{mount.target}/{part}", writable, whole=True)


def id_mappings(owner: Owner, first_id: int | None, user: Identity) -> tuple[list[IdMapping], list[IdMapping]]:
    """Returns those of users, and those of groups."""
    base, uid, gid = first_id or 0, user.uid or 0, user.gid or 0
    users, groups = [IdMapping(owner.uid, base + uid, 1)], [IdMapping(owner.gid, base + gid, 1)]
    groups += [IdMapping(group, base + _FIRST_GROUP + index, 1) for index, group in enumerate(owner.groups)]
    if first_id is None:
        users += [IdMapping(UNUSED_ID, 0, 1)] if uid else []
        groups += [IdMapping(UNUSED_ID, 0, 1)] if gid else []
    return users, groups


def _map_owners(mount: Mount, tree: int, owner: Owner, first_id: int | None, user: Identity) -> None:
    try:
        map_ids(tree, *id_mappings(owner, first_id, user))
    except OSError as error:
        cause = f"the owners of its files cannot be mapped to the sandbox's: {error.strerror}"
        hint = "id-mapped mounts need Linux 5.12 or later and a filesystem that knows them: ext4, xfs, btrfs, ..."
        raise EngineError(f"mount {mount.source}", cause, hint) from error


def load_parent(parent: SandboxPaths) -> Record:
    try:
        return Record.load(parent.record)
    except (FileNotFoundError, ValueError) as error:
        raise EngineError(_CONTROL, f"{parent.top.name} is not there any more") from error


def share_workspace(parent: SandboxPaths, child: SandboxPaths, child_first: int | None) -> Path:
    """Mounts the parent's workspace below the child's directory: the same files, live. Returns where.

    Each native sandbox has ids of its own on the machine, so the child sees the files through an id-mapped mount: what
    belongs to uid 1000 of the parent belongs to uid 1000 of the child. The mount holds the parent's disk for as long as
    the child lives, also when the parent is gone.
    """
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
