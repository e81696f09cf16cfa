"""Trees of files: their modes, owners and digest, and a copy of one that is not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from k8e.engine.local.system.calls import DIRECTORY, opened

DEEPEST: Final = 100
_PIECE: Final = 1 << 30


class TooDeep(OSError):
    pass


def set_modes(top: Path) -> None:
    """Makes all files readable for every user inside, whatever the daemon's umask; what was executable stays so."""
    top.chmod(0o755)
    for parent, directories, files in os.walk(top):
        for name in (*directories, *files):
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def give_tree(top: Path, uid: int, gid: int) -> None:
    os.lchown(top, uid, gid)
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        for name in (*directories, *files):
            os.chown(name, uid, gid, dir_fd=handle, follow_symlinks=False)


def digest_tree(top: Path) -> str:
    """Hashes names, kinds, modes and contents: a template with the same digest can be used again."""
    total = hashlib.sha256()
    for parent, directories, files in os.walk(top):
        directories.sort()
        for name in sorted((*directories, *files)):
            path = Path(parent, name)
            status = path.lstat()
            total.update(
                f"{path.relative_to(top)}\0{status.st_mode:o}\0{status.st_uid}\0".encode(errors="surrogateescape")
            )
            if path.is_symlink():
                total.update(os.fsencode(os.readlink(path)))
            elif path.is_file():
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def copy_tree(source: int, target: int) -> None:
    """Copies from one open directory to another: what an image has at /workspace, which is a directory of its own on
    every disk. Owners, modes and times stay; what is no file, link, FIFO or directory is left out. Nothing is followed,
    opened for its effect or believed; the disk's limits bound how much is copied. Nothing runs in either."""
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
