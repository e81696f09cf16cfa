"""The writable part of a sandbox: a file with an ext4 inside, so that bytes and inodes are limited exactly, by the
kernel, on any machine, and the same for every runtime.

Each is a sparse copy of a template that already holds the image's own files. mkfs.ext4 fills templates itself (-d), so
making one mounts nothing. Making a disk starts no tool: its parts take a few milliseconds, and a process costs as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.damage import Damaged, check_own, read_own
from k8e.engine.local.disk.inodes import Stretch, UnknownLayout, read_stretches, shift_owners
from k8e.engine.local.system.calls import MS_NOATIME, MS_NODEV, MS_NOSUID, mount, opened
from k8e.engine.local.system.tool import run_tool

MIN_DISK = 32 << 20
_log = logging.getLogger("k8e.engine")
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
# struct loop_config: fd, block_size, struct loop_info64 (of which only the flags are not zero), reserved.
_CONFIG = struct.Struct("<II 52x I 176x 64x")
# The tables of unused inodes are holes, which read as zeros: the kernel must not fill them in the background.
_OPTIONS = "noinit_itable"
_ATTEMPTS = 64  # another process may take the device that was found free


async def make_template(content: Path, size: int, inodes: int, target: Path, *, journal: bool = False) -> None:
    """Makes a filesystem whose root directory is `content`. It appears under its name only when it is complete.
    `journal`: for a virtual machine's kernel, whose disk the machine never mounts, nor repairs, once it was used."""
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.truncate(size)
        await run_tool(
            # metadata_csum is off for inodes.py, and then uninit_bg is what leaves unused inode tables unwritten.
            *("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(inodes)),
            *("-O", f"{'' if journal else '^'}has_journal,^resize_inode,^metadata_csum,uninit_bg"),
            *("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, partial),
            deadline=120,
        )
        await asyncio.to_thread(_seal, partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _seal(partial: Path, target: Path) -> None:
    """Renames the digest first: a template without one is made again."""
    digest = target.with_suffix(".sha256")
    draft = digest.with_name(f"{digest.name}.{os.getpid()}")
    draft.write_text(_digest(partial))
    draft.rename(digest)
    partial.rename(target)


def check_template(image: Path) -> None:
    """Raises Damaged unless every block is as it was made, FileNotFoundError when there is no template."""
    check_own(image.lstat())
    try:
        wanted = read_own(image.with_suffix(".sha256"))
    except FileNotFoundError:
        raise Damaged("there is no digest of it") from None
    if wanted.decode(errors="replace") != _digest(image):
        raise Damaged("its content is not what it was made with")


def _digest(image: Path) -> str:
    """Hashes what is not a hole, with where it is."""
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
    """Copies the template and mounts the copy. `first_id`: everything on it belongs to the range of ids that begins
    there."""
    with opened(image, os.O_RDWR | os.O_CREAT | os.O_EXCL) as target:
        with opened(template.image, os.O_RDONLY) as source:
            _copy_sparse(source, target)
        if first_id is not None and template.inodes is not None:
            shift_owners(target, template.inodes, first_id)
    where.mkdir(mode=0o711)
    mount_image(image, where)
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


def mount_image(image: Path, where: Path) -> None:
    """Mounts an ext4 by a loop device, as `mount -o loop` does, without a process: the start of the tool costs more
    than the mount itself. noatime: reading must not write. nosuid, nodev: what a sandbox puts there stays data to the
    machine.

    The kernel takes a loop device back when its last user is gone (autoclear). From its set-up until it is mounted that
    is the daemon's descriptor, so a daemon that is killed in between leaves no device.
    """
    with opened(image, os.O_RDWR) as file:
        device, path = _attach(file)
    try:
        mount(path, where, "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, _OPTIONS)
    finally:
        os.close(device)


def _attach(file: int) -> tuple[int, str]:
    """Returns a device that shows the file, as a descriptor that keeps it, and the device's path."""
    with opened("/dev/loop-control", os.O_RDWR) as control:
        for _ in range(_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            with contextlib.suppress(FileNotFoundError):  # found free, and removed by another process since
                device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(device, _LOOP_CONFIGURE, _CONFIG.pack(file, 0, _LO_FLAGS_AUTOCLEAR))
                except OSError as error:
                    os.close(device)
                    if error.errno not in (errno.EBUSY, errno.ENXIO):
                        raise
                else:
                    return device, path
        raise OSError(errno.EBUSY, "no loop device stays free")
