"""An overlay of an image's layers: lower layers that all sandboxes share and none writes to, one upper layer that is
the sandbox's own and on its own disk, where bytes and inodes are limited.

Paths reach the kernel as descriptors (/proc/self/fd/N): 127 layers fit into the one page that mount options have, and a
colon or a comma in a path means nothing. A native sandbox has a range of ids of its own; the layers' files are shown in
that range by an id-mapped mount, of which the kernel keeps a private copy, so that ours is gone again before the
sandbox starts.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.local.mounts.detached import IdMapping, cloned, map_ids
from k8e.engine.local.runtime.bundle import ID_COUNT
from k8e.engine.local.system.calls import (
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    PATH_OF_DIRECTORY,
    mount,
    move_mount,
    opened,
    umount2,
)

MAX_LAYERS: Final = 127
# redirect_dir: without it a directory of the image could not be renamed (EXDEV), which package managers do. What says
# where it came from is written by the kernel, on the upper layer, as an attribute (trusted.*) that no process inside
# can set. metacopy, index: off, whatever the kernel was built with: the one would believe such attributes of the layers
# below, the other would refuse a disk that is mounted again. No userxattr: those could be set from inside.
_OPTIONS: Final = "redirect_dir=on,metacopy=off,index=off,nfs_export=off,xino=auto"
_PAGE: Final = 4095
CONTROL: Final = "image root"


def mount_layers(
    layers: Sequence[Path], upper: Path, work: Path, where: Path, *, first_id: int | None, aside: Path
) -> None:
    """`layers`: the lowest first. `aside`: a name below the sandbox's directory, for a mount that is gone at the end.
    Raises EngineError when this machine cannot."""
    if not 0 < len(layers) <= MAX_LAYERS:
        raise EngineError(CONTROL, f"{len(layers)} layers, possible are 1 to {MAX_LAYERS}")
    with contextlib.ExitStack() as open_files:
        if first_id is None:
            below = [_open_layer(layer, open_files) for layer in layers]
        else:
            below = open_files.enter_context(_shown_as(layers, first_id, aside))
        above, scratch = (_open_layer(path, open_files) for path in (upper, work))
        lower = ":".join(f"/proc/self/fd/{layer}" for layer in reversed(below))
        options = f"{_OPTIONS},upperdir=/proc/self/fd/{above},workdir=/proc/self/fd/{scratch},lowerdir={lower}"
        if len(options) > _PAGE:
            raise EngineError(CONTROL, f"{len(layers)} layers do not fit into the kernel's page for options")
        try:
            mount("k8e", where, "overlay", MS_NOSUID | MS_NODEV | MS_NOATIME, options)
        except OSError as error:
            raise _explain(error) from error


def _explain(error: OSError) -> EngineError:
    if error.errno == errno.ENODEV:
        return EngineError(CONTROL, "this kernel has no overlayfs", "modprobe overlay, or use the image `host`")
    hint = "images of the native runtime need Linux 5.19 or newer" if error.errno == errno.EINVAL else ""
    return EngineError(CONTROL, f"the kernel does not mount the layers: {error.strerror}", hint)


def _open_layer(path: Path, files: contextlib.ExitStack) -> int:
    try:
        return files.enter_context(opened(path, PATH_OF_DIRECTORY))
    except OSError as error:
        cause = f"{path} is not there or damaged: {error.strerror}"
        raise EngineError("image layer", cause, "remove the image and pull it again") from error


@contextlib.contextmanager
def _shown_as(layers: Sequence[Path], first_id: int, aside: Path) -> Iterator[list[int]]:
    """Mounts them with shifted owners. One mount has them all: they lie below one directory."""
    top = Path(os.path.commonpath(layers))
    with contextlib.ExitStack() as files:
        originals = [_open_layer(layer, files) for layer in layers]
        aside.mkdir(mode=0o700, exist_ok=True)  # a daemon that was killed may have left it, with nothing there
        try:
            _mount_shown(top, first_id, aside)
            try:
                shown = [_open_layer(aside / layer.relative_to(top), files) for layer in layers]
                for layer, one, other in zip(layers, originals, shown, strict=True):
                    if not os.path.samestat(os.fstat(one), os.fstat(other)):
                        raise EngineError("image layer", f"{layer} is on another filesystem than {top}")
                yield shown
            finally:
                try:
                    umount2(aside, MNT_DETACH)
                except OSError as error:
                    raise EngineError(CONTROL, f"{aside} cannot be unmounted: {error.strerror}") from error
        finally:
            aside.rmdir()


def _mount_shown(top: Path, first_id: int, aside: Path) -> None:
    try:
        with cloned(top, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) as tree:
            map_ids(tree, [IdMapping(0, first_id, ID_COUNT)])
            move_mount(tree, aside)
    except OSError as error:
        hint = "images of the native runtime need a filesystem that can map ids, such as ext4, xfs or btrfs"
        raise EngineError("id-mapped mount", f"the layers in {top} cannot be shown: {error.strerror}", hint) from error
