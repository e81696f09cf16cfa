"""What a sandbox sees of the machine, put together below its own directory on the host: one mount for each directory
that was asked for, with the owners of files as the sandbox is to see them.

Owners: the machine's user is the sandbox's default user, in both directions, and this user's other groups have numbers
of their own. Nobody else is mapped: their files belong to nobody, can be read where everybody can read them, and can be
changed by nobody inside, root included, whom the mount does not know either. With gVisor it is root of the machine that
makes files and gives them to their owners right after; there root of the sandbox stands for an id that is nobody's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from k8e.engine import EngineError, Mount
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.keeping import keep_parts
from k8e.engine.local.mounts.kernel import (
    NODEV,
    NOSUID,
    RDONLY,
    Span,
    attach_mount,
    change_mount,
    clone_mount,
    id_map,
)
from k8e.engine.local.mounts.owner import Owner, find_owner
from k8e.engine.local.mounts.placeholders import stand_in
from k8e.engine.local.mounts.source import open_source, refusal
from k8e.engine.local.mounts.veil import draw_veil, resolve_hidden
from k8e.engine.local.runtime.bundle import Bind
from k8e.link.model import Identity

NOBODYS_ID = 0x2FFF0000  # below those of native sandboxes, above everybody else's
_FIRST_GROUP = 60_000  # inside, of those that the machine's user is in besides the first


def show_mounts(
    mounts: Sequence[Mount],
    layout: Layout,
    paths: SandboxPaths,
    first_id: int | None,
    user: Identity,
    known: Sequence[int] = (),
) -> tuple[list[Bind], tuple[int, ...]]:
    """`user`: the sandbox's default user; `known`: the inodes of the sources when they were first shown, for they are
    to be the same. Returns them, too. Raises MountRefused when one of them is not to be shown."""
    binds: list[Bind] = []
    found: list[int] = []
    for index, mount in enumerate(mounts):
        owner = find_owner(mount.owner)
        source = open_source(mount, owner, layout)
        try:
            found.append(os.fstat(source).st_ino)  # without the device, which may have another number after a reboot
            if known and found != list(known[: index + 1]):
                raise refusal(mount, "another directory is there by now than when it was first shown")
            binds += _show(mount, owner, source, paths, f"mount-{index}", first_id, user)
        except OSError as error:
            raise EngineError(f"mount {mount.source}", str(error)) from error
        finally:
            os.close(source)
    return binds, tuple(found)


def make_mount_point(paths: SandboxPaths, name: str) -> Path:
    paths.mounts.mkdir(mode=0o711, exist_ok=True)
    paths.mounts.chmod(0o711)  # whatever the umask is: root of a native sandbox is nobody here
    target = paths.mounts / name
    target.mkdir(mode=0o755, exist_ok=True)
    return target


def seal_mounts(paths: SandboxPaths) -> None:
    """Makes them read-only here, where they have to stay (see keeping.py): the sandbox has its own copies by now, and
    nobody who removes a directory of ours must ever remove somebody's project with it."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(paths.mounts):
            handle = os.open(paths.mounts / name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                change_mount(handle, RDONLY, recursive=True)
            finally:
                os.close(handle)


def _show(
    mount: Mount, owner: Owner, source: int, paths: SandboxPaths, name: str, first_id: int | None, user: Identity
) -> Iterator[Bind]:
    target = make_mount_point(paths, name)
    with contextlib.ExitStack() as files:
        copy = clone_mount(source, NOSUID | NODEV | (0 if mount.writable else RDONLY))
        files.callback(os.close, copy)
        _map_owners(mount, copy, owner, first_id, user)
        if mount.hidden:
            veil = paths.veils / name
            shutil.rmtree(veil, ignore_errors=True)  # of the last time, if it was stopped
            veil.mkdir(parents=True)
            hidden = resolve_hidden(mount, source, owner)
            draw_veil(copy, hidden, veil, make_mount_point(paths, f"{name}-below"), target)
        else:
            attach_mount(copy, target)
        yield Bind(os.fspath(target), mount.target, mount.writable, whole=True)
        if mount.writable:
            with stand_in(mount, owner, source, paths) as complete:
                parts = list(keep_parts(complete, copy))
            if first_id is None:
                # gVisor's kernel has to know the mount points: it does not ask the machine's before a rename.
                for part, writable in parts:
                    yield Bind(os.fspath(target / part), f"{mount.target}/{part}", writable, whole=True)


def list_spans(owner: Owner, first_id: int | None, user: Identity) -> tuple[list[Span], list[Span]]:
    """Of users, and of groups."""
    base, uid, gid = first_id or 0, user.uid or 0, user.gid or 0
    users, groups = [Span(owner.uid, base + uid, 1)], [Span(owner.gid, base + gid, 1)]
    groups += [Span(group, base + _FIRST_GROUP + index, 1) for index, group in enumerate(owner.groups)]
    if first_id is None:
        users += [Span(NOBODYS_ID, 0, 1)] if uid else []
        groups += [Span(NOBODYS_ID, 0, 1)] if gid else []
    return users, groups


def _map_owners(mount: Mount, copy: int, owner: Owner, first_id: int | None, user: Identity) -> None:
    try:
        with id_map(*list_spans(owner, first_id, user)) as namespace:
            change_mount(copy, 0, namespace=namespace)
    except OSError as error:
        cause = f"the owners of its files cannot be mapped to the sandbox's: {error.strerror}"
        hint = "id-mapped mounts need Linux 5.12 or later and a filesystem that knows them: ext4, xfs, btrfs, ..."
        raise EngineError(f"mount {mount.source}", cause, hint) from error
