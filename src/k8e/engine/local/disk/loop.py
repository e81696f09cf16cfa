"""Mounting a disk's image as `mount -o loop` does, without a process for it: the start of the tool costs more than the
mount itself.

The kernel takes a loop device back when its last user is gone (autoclear). From its set-up until it is mounted that is
our descriptor, so a daemon that is killed in between leaves none behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
# struct loop_config: fd, block_size, struct loop_info64 (of which only the flags are not zero), reserved.
_CONFIG = struct.Struct("<II 52x I 176x 64x")
_ATTEMPTS = 64  # another process may take the device that was found free

MS_NOSUID = 2
MS_NODEV = 4
MS_NOATIME = 1024


def mount_image(image: Path, where: Path, options: str) -> None:
    """ext4. noatime: reading must not write. nosuid, nodev: whatever a sandbox puts there stays data to the host."""
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        device, path = _attach(file)
    finally:
        os.close(file)
    try:
        _mount(path, where, MS_NOSUID | MS_NODEV | MS_NOATIME, options)
    finally:
        os.close(device)


def _attach(file: int) -> tuple[int, str]:
    """A device that shows the file, as a descriptor that keeps it, and its path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            with contextlib.suppress(FileNotFoundError):  # found free, and removed by somebody since
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
    finally:
        os.close(control)


def _mount(source: str, where: Path, flags: int, options: str) -> None:
    target = os.fsencode(where)
    if _libc.mount(os.fsencode(source), target, b"ext4", ctypes.c_ulong(flags), options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount: {os.strerror(code)}", os.fspath(where))
