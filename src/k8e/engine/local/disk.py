"""The writable part of a sandbox: a file with an ext4 inside, so that bytes and inodes are limited exactly, by the
kernel, on any machine, and the same for every runtime.

Each is a sparse copy of a template that already holds the image's own files. mkfs.ext4 fills templates itself (-d), so
making one mounts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.tool import run_tool

MIN_DISK = 32 << 20
_OCTAL = re.compile(r"\\([0-7]{3})")


async def make_template(content: Path, size: int, inodes: int, target: Path) -> None:
    """`content` becomes the filesystem's root directory. Appears under its name only when it is complete."""
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.truncate(size)
        await run_tool(
            *("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(inodes), "-O", "^has_journal,^resize_inode"),
            *("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, partial),
            deadline=120,
        )
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


async def mount_copy(template: Path, image: Path, where: Path) -> None:
    await run_tool("cp", "--sparse=always", "--reflink=auto", template, image)
    await asyncio.to_thread(where.mkdir, 0o711)
    # noatime: reading must not write. nosuid, nodev: whatever a sandbox puts there stays data to the host.
    await run_tool("mount", "-o", "loop,nosuid,nodev,noatime", image, where)


def mounts_below(top: Path) -> list[Path]:
    """Mount points at and below a directory, the innermost first."""
    prefix = os.fspath(top)
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split()[4])
        if point == prefix or point.startswith(prefix + "/"):
            found.append(Path(point))
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


async def unmount_below(top: Path) -> None:
    while points := await asyncio.to_thread(mounts_below, top):
        for point in points:
            await run_tool("umount", point)


def remove_tree(top: Path) -> None:
    """Removes a sandbox's directory. Nothing is mounted there any more, so what a sandbox wrote is inside the image."""
    if mounts_below(top):
        raise EngineError("disk", f"{top} still has mounts")
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
