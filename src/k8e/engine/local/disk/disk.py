"""The writable part of a sandbox: a file with an ext4 inside, so that bytes and inodes are limited exactly, by the
kernel, on any machine, and the same for every runtime.

Each is a sparse copy of a template that already holds the image's own files. mkfs.ext4 fills templates itself (-d), so
making one mounts nothing. Making a disk starts no tool: its parts take a few milliseconds, and a process costs as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.damage import Damaged, check_own, read_own
from k8e.engine import EngineError
from k8e.engine.local.disk.inodes import Stretch, UnknownLayout, read_stretches, shift_owners
from k8e.engine.local.disk.loop import mount_image
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.system.calls import UMOUNT_NOFOLLOW, umount2
from k8e.engine.local.system.mountinfo import read_mounts
from k8e.engine.local.system.tool import run_tool

MIN_DISK = 32 << 20
# The tables of inodes that nobody used yet are holes, which read as zeros: nothing is to fill them in the background.
_OPTIONS = "noinit_itable"
_BUSY_PAUSE = 0.01  # nothing tells when a mount stops being busy
_log = logging.getLogger("k8e.engine")


async def make_template(content: Path, size: int, inodes: int, target: Path) -> None:
    """`content` becomes the filesystem's root directory. Appears under its name only when it is complete."""
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.truncate(size)
        await run_tool(
            # metadata_csum is off for inodes.py, and then uninit_bg is what leaves unused inode tables unwritten.
            *("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(inodes)),
            *("-O", "^has_journal,^resize_inode,^metadata_csum,uninit_bg"),
            *("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, partial),
            deadline=120,
        )
        await asyncio.to_thread(_seal, partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _seal(partial: Path, target: Path) -> None:
    """The digest first: a template without one is made again."""
    digest = target.with_suffix(".sha256")
    draft = digest.with_name(f"{digest.name}.{os.getpid()}")
    draft.write_text(_digest(partial))
    draft.rename(digest)
    partial.rename(target)


def check_template(image: Path) -> None:
    """Damaged, unless every block is as it was made; FileNotFoundError."""
    with_digest = image.with_suffix(".sha256")
    check_own(image.lstat())
    try:
        wanted = read_own(with_digest)
    except FileNotFoundError:
        raise Damaged("there is no digest of it") from None
    if wanted.decode(errors="replace") != _digest(image):
        raise Damaged("its content is not what it was made with")


def _digest(image: Path) -> str:
    """Of what is not a hole, with where it is."""
    total = hashlib.sha256()
    with image.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        total.update(str(size).encode())
        for begin, end in _stretches(file.fileno(), size):
            while begin < end:
                content = os.pread(file.fileno(), min(end - begin, 1 << 20), begin)
                if not content:
                    raise Damaged("it is cut short")
                if content.count(0) != len(content):  # what is written as a hole and what is zeros are the same
                    total.update(f"{begin}:".encode() + content)
                begin += len(content)
    return total.hexdigest()


def _stretches(source: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            begin = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # nothing but holes
            raise
        end = os.lseek(source, begin, os.SEEK_HOLE)
        yield begin, end


@dataclass(frozen=True, slots=True)
class Template:
    image: Path
    inodes: tuple[Stretch, ...] | None  # None: owners have to be changed file by file


def load_template(image: Path) -> Template:
    try:
        return Template(image, read_stretches(image))
    except UnknownLayout as error:
        _log.warning("the files of %s are given to their owners one by one: %s", image, error)
        return Template(image, None)


def mount_copy(template: Template, image: Path, where: Path, first_id: int | None) -> None:
    """`first_id`: everything on it belongs to the range of ids that begins there."""
    target = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with template.image.open("rb") as source:
            _copy_sparse(source.fileno(), target)
        if first_id is not None and template.inodes is not None:
            shift_owners(target, template.inodes, first_id)
    finally:
        os.close(target)
    where.mkdir(mode=0o711)
    mount_image(image, where, _OPTIONS)
    if first_id is not None and template.inodes is None:
        _walk_owners(where, first_id)


def _copy_sparse(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for begin, end in _stretches(source, size):
        while begin < end:
            # Shares the blocks where the filesystem can.
            copied = os.copy_file_range(source, target, end - begin, begin, begin)
            if not copied:
                raise OSError(errno.EIO, "the template ended early")
            begin += copied


def _walk_owners(top: Path, first_id: int) -> None:
    """Moves everything below into a sandbox's own range of ids. Nothing runs there yet."""
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        for name in (*directories, *files):
            status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if status.st_uid < first_id:  # a file with several names is met several times
                uid, gid = first_id + status.st_uid, first_id + status.st_gid
                os.chown(name, uid, gid, dir_fd=handle, follow_symlinks=False)
    os.chown(top, first_id, first_id)


def mounts_below(top: Path) -> list[Path]:
    """Mount points at and below a directory, the innermost first."""
    found = [mount.point for mount in read_mounts() if mount.point == top or top in mount.point.parents]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def unmount(point: Path) -> bool:
    """False while a process is still using it."""
    try:
        umount2(point, UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno != errno.EINVAL:  # which says that it is not mounted any more
            raise EngineError("disk", f"{point} cannot be unmounted: {error.strerror}") from error
    return True


async def unmount_below(top: Path, deadline: float = 10.0) -> None:
    """A process that is dying, perhaps one that a killed runtime left, can hold a mount for a moment longer."""
    end = time.monotonic() + deadline
    while points := await asyncio.to_thread(mounts_below, top):
        busy = [point for point in points if not await asyncio.to_thread(unmount, point)]
        if busy and time.monotonic() > end:
            raise EngineError("disk", f"{busy[0]} is still in use after {deadline:g} s")
        if busy:
            await asyncio.sleep(_BUSY_PAUSE)


def remove_mount_points(folder: Path) -> None:
    """One by one, and only if they are empty: behind them were directories of the machine's users. If one were mounted
    there still, whatever we think, this fails and removes nothing."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            os.rmdir(folder / name)
        os.rmdir(folder)


def remove_tree(top: Path) -> None:
    """Removes a sandbox's directory. Nothing is mounted there any more, so what a sandbox wrote is inside the image."""
    if mounts_below(top):
        raise EngineError("disk", f"{top} still has mounts")
    for folder in (SandboxPaths(top).mounts, SandboxPaths(top).slots):
        remove_mount_points(folder)
    if not top.is_dir() or top.is_symlink():
        top.unlink(missing_ok=True)  # it never was a sandbox
        return
    with contextlib.suppress(FileNotFoundError):
        for parent, directories, files, handle in os.fwalk(top, topdown=False, follow_symlinks=False):
            for name in files:
                os.unlink(name, dir_fd=handle)
            for name in directories:
                if os.path.islink(os.path.join(parent, name)):
                    os.unlink(name, dir_fd=handle)
                else:
                    os.rmdir(name, dir_fd=handle)
        top.rmdir()
