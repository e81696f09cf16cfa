"""Mounts a disk's image by a loop device, as `mount -o loop` does, without a process: the start of the tool costs more
than the mount itself.

The kernel takes a loop device back when its last user is gone (autoclear). From its set-up until it is mounted that is
the daemon's descriptor, so a daemon that is killed in between leaves no device.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

from k8e.engine.local.system.calls import MS_NOATIME, MS_NODEV, MS_NOSUID, mount, opened

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
# struct loop_config: fd, block_size, struct loop_info64 (of which only the flags are not zero), reserved.
_CONFIG = struct.Struct("<II 52x I 176x 64x")
# The tables of unused inodes are holes, which read as zeros: the kernel must not fill them in the background.
_OPTIONS = "noinit_itable"
_ATTEMPTS = 64  # another process may take the device that was found free


def mount_image(image: Path, where: Path) -> None:
    """Mounts an ext4. noatime: reading must not write. nosuid, nodev: what a sandbox puts there stays data to the
    machine."""
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
