"""Mounts: new ones, and changes to those that are there."""

from __future__ import annotations

import os
import struct

from .calls import AT_FDCWD, ATTEMPTS, Attempt, attempt, call, scratch

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18


def mount_type(kind: bytes, data: bytes | None = None) -> Attempt:
    return lambda: call("mount", kind, scratch().encode(), kind, 0, data)


for _kind in ("tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "ramfs", "debugfs", "tracefs", "fuse",
              "9p", "bpf", "securityfs", "configfs", "devtmpfs"):  # fmt: skip
    ATTEMPTS[f"mount-{_kind}"] = mount_type(_kind.encode())


@attempt("mount-overlay")
def mount_overlay() -> object:
    top = scratch()
    for name in ("l", "u", "w", "m"):
        os.mkdir(f"{top}/{name}")
    options = f"lowerdir={top}/l,upperdir={top}/u,workdir={top}/w".encode()
    return call("mount", b"overlay", f"{top}/m".encode(), b"overlay", 0, options)


ATTEMPTS["mount-bind"] = lambda: call("mount", b"/usr", scratch().encode(), None, MS_BIND, None)
ATTEMPTS["mount-bind-recursive"] = lambda: call("mount", b"/", scratch().encode(), None, MS_BIND | MS_REC, None)
ATTEMPTS["mount-move"] = lambda: call("mount", b"/tmp", scratch().encode(), None, MS_MOVE, None)
ATTEMPTS["mount-propagation"] = lambda: call("mount", None, b"/", None, MS_PRIVATE | MS_REC, None)
for _point in ("/", "/usr", "/proc", "/proc/sys", "/k8e-agent", "/tmp", "/dev"):
    for _flags, _label in ((MS_REMOUNT, "remount"), (MS_REMOUNT | MS_BIND, "remount-bind")):
        ATTEMPTS[f"{_label}-{_point}"] = lambda point=_point, flags=_flags: call(  # type: ignore[misc]
            "mount", None, point.encode(), None, flags, None
        )
for _point in ("/usr", "/proc", "/proc/sys", "/proc/kcore", "/k8e-agent", "/run/k8e", "/tmp", "/dev", "/"):
    ATTEMPTS[f"umount-{_point}"] = lambda point=_point: call("umount2", point.encode(), 2)  # type: ignore[misc]
ATTEMPTS["fsopen"] = lambda: call("fsopen", b"tmpfs", 0)
ATTEMPTS["fsconfig"] = lambda: call("fsconfig", 0, 6, None, None, 0)
ATTEMPTS["fsmount"] = lambda: call("fsmount", 0, 0, 0)
ATTEMPTS["fspick"] = lambda: call("fspick", AT_FDCWD, b"/usr", 0)
ATTEMPTS["open_tree"] = lambda: call("open_tree", AT_FDCWD, b"/usr", 1)
ATTEMPTS["open_tree_attr"] = lambda: call("open_tree_attr", AT_FDCWD, b"/usr", 1, bytes(32), 32)
ATTEMPTS["move_mount"] = lambda: call("move_mount", AT_FDCWD, b"/usr", AT_FDCWD, scratch().encode(), 0)
ATTEMPTS["mount_setattr"] = lambda: call("mount_setattr", AT_FDCWD, b"/usr", 0, struct.pack("<4Q", 0, 1, 0, 0), 32)
ATTEMPTS["pivot_root"] = lambda: call("pivot_root", b".", b".")
ATTEMPTS["chroot"] = lambda: call("chroot", scratch().encode())
ATTEMPTS["chroot-here"] = lambda: call("chroot", b"/")
