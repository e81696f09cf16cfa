"""Copies a tree that is not trusted, file by file: what an image has at /workspace, which is a directory of its own on
every disk. Nothing is followed, opened for its effect or believed; the disk's limits bound how much is copied."""

from __future__ import annotations

import os
import stat
from typing import Final

from k8e.engine.local.system.descriptors import DIRECTORY, opened

DEEPEST: Final = 100
_PIECE: Final = 1 << 30


class TooDeep(OSError):
    pass


def copy_tree(source: int, target: int) -> None:
    """Copies from one open directory to another. Owners, modes and times stay; what is no file, link, FIFO or directory
    is left out. Nothing runs in either."""
    _copy(source, target, {}, target, "", 0)


def _copy(source: int, target: int, known: dict[tuple[int, int], str], top: int, path: str, depth: int) -> None:
    if depth > DEEPEST:
        raise TooDeep(f"more than {DEEPEST} directories deep")
    for name in os.listdir(source):
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        place = f"{path}{name}"
        twin = known.get((status.st_dev, status.st_ino))
        if twin is not None:
            os.link(twin, place, src_dir_fd=top, dst_dir_fd=top, follow_symlinks=False)
            continue
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            known[status.st_dev, status.st_ino] = place
        if stat.S_ISDIR(status.st_mode):
            _copy_folder(source, target, name, status, known, top, place, depth)
        elif stat.S_ISREG(status.st_mode):
            _copy_file(source, target, name, status)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISFIFO(status.st_mode):
            os.mkfifo(name, 0o600, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)


def _copy_folder(
    source: int,
    target: int,
    name: str,
    status: os.stat_result,
    known: dict[tuple[int, int], str],
    top: int,
    place: str,
    depth: int,
) -> None:
    os.mkdir(name, 0o700, dir_fd=target)
    with opened(name, DIRECTORY, folder=source) as below, opened(name, DIRECTORY, folder=target) as copy:
        _copy(below, copy, known, top, f"{place}/", depth + 1)
        _copy_attributes(copy, status)


def _copy_file(source: int, target: int, name: str, status: os.stat_result) -> None:
    creation = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder=source) as original,
        opened(name, creation, folder=target) as copy,
    ):
        while os.sendfile(copy, original, None, _PIECE):
            pass
        _copy_attributes(copy, status)


def _copy_attributes(handle: int, status: os.stat_result) -> None:
    os.fchown(handle, status.st_uid, status.st_gid)
    os.fchmod(handle, stat.S_IMODE(status.st_mode))  # after the owner, whose change takes set-uid bits away
    os.utime(handle, ns=(status.st_atime_ns, status.st_mtime_ns))
