"""Many layers, shown as one directory: layers below that are everybody's and never written, one above that is the
sandbox's own and on its own disk, where bytes and inodes are limited.

Paths reach the kernel as descriptors (/proc/self/fd/N): 127 layers fit into the one page that mount options have, and a
colon or a comma in a path means nothing. A native sandbox has a range of ids of its own; the layers' files are shown in
that range by an id-mapped mount, of which the kernel keeps a private copy, so that ours is gone again before the
sandbox starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.local.disk.loop import MS_NOATIME, MS_NODEV, MS_NOSUID
from k8e.engine.local.mounts.kernel import NODEV, NOSUID, RDONLY, Span, attach_mount, change_mount, clone_mount, id_map
from k8e.engine.local.runtime.bundle import ID_COUNT

MAX_LAYERS: Final = 127
# redirect_dir: without it a directory of the image could not be renamed (EXDEV), which package managers do. What says
# where it came from is written by the kernel, on the upper layer, as an attribute (trusted.*) that nobody inside can
# set. metacopy, index: off, whatever the kernel was built with: the one would believe such attributes of the layers
# below, the other would refuse a disk that is mounted again. No userxattr: those could be set from inside.
_OPTIONS: Final = "redirect_dir=on,metacopy=off,index=off,nfs_export=off,xino=auto"
_DETACH: Final = 2
_PAGE: Final = 4095
CONTROL: Final = "image root"
_libc = ctypes.CDLL(None, use_errno=True)


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
        options = f"{_OPTIONS},upperdir=/proc/self/fd/{above},workdir=/proc/self/fd/{scratch},lowerdir={lower}".encode()
        if len(options) > _PAGE:
            raise EngineError(CONTROL, f"{len(layers)} layers do not fit into the kernel's page for options")
        flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOATIME)
        if _libc.mount(b"k8e", os.fsencode(where), b"overlay", flags, options) != 0:
            raise _explain(ctypes.get_errno())


def _explain(code: int) -> EngineError:
    if code == errno.ENODEV:
        return EngineError(CONTROL, "this kernel has no overlayfs", "modprobe overlay, or use the image `host`")
    return EngineError(
        CONTROL,
        f"the kernel does not mount the layers: {os.strerror(code)}",
        "images of the native runtime need Linux 5.19 or newer" if code == errno.EINVAL else "",
    )


def _open_layer(path: Path, files: contextlib.ExitStack) -> int:
    try:
        handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _missing(path, error) from error
    files.callback(os.close, handle)
    return handle


def _missing(path: Path, error: OSError) -> EngineError:
    hint = "remove the image and pull it again"
    return EngineError("image layer", f"{path} is not there or damaged: {error.strerror}", hint)


@contextlib.contextmanager
def _shown_as(layers: Sequence[Path], first_id: int, aside: Path) -> Iterator[list[int]]:
    """One mount shows them all: they lie below one directory."""
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
                if _libc.umount2(os.fsencode(aside), _DETACH) != 0:
                    code = ctypes.get_errno()
                    raise EngineError(CONTROL, f"{aside} cannot be unmounted: {os.strerror(code)}")
        finally:
            aside.rmdir()


def _mount_shown(top: Path, first_id: int, aside: Path) -> None:
    try:
        with id_map([Span(0, first_id, ID_COUNT)]) as namespace:
            mount = clone_mount(top, RDONLY | NOSUID | NODEV)
            try:
                change_mount(mount, 0, namespace=namespace)
                attach_mount(mount, aside)
            finally:
                os.close(mount)
    except OSError as error:
        hint = "images of the native runtime need a filesystem that can map ids, such as ext4, xfs or btrfs"
        raise EngineError("id-mapped mount", f"the layers in {top} cannot be shown: {error.strerror}", hint) from error
