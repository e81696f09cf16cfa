"""The kernel's newer calls for mounts, with errno: mounts that are nowhere until they are complete, and that show files
as another range of owners.

A detached mount is a descriptor and gone with it, so a daemon that is killed between two calls leaves none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.clone.restype = ctypes.c_int

# The same on every architecture that has them: they are younger than the common table.
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_MOUNT_SETATTR: Final = 442
_OPENAT2: Final = 437

AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MS_PRIVATE: Final = 1 << 18
_MS_SHARED: Final = 1 << 20
_CLONE_VM: Final = 0x100
_CLONE_NEWUSER: Final = 0x10000000
_WAIT_ALL: Final = 0x40000000  # __WALL: a child that sends no signal when it ends
_STACK: Final = 64 << 10

RDONLY: Final = 0x1
NOSUID: Final = 0x2
NODEV: Final = 0x4
_IDMAP: Final = 0x100000


# How a path is resolved (openat2).
NO_MAGICLINKS: Final = 0x02
IN_ROOT: Final = 0x10
_AGAIN: Final = 128  # the kernel asks for another try when something was renamed meanwhile, anywhere


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("namespace", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """`count` ids from `stored` on, as files have them, are shown as those from `shown` on."""

    stored: int
    shown: int
    count: int


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def open_resolved(folder: int, path: str, flags: int, resolve: int) -> int:
    how = _How(flags | os.O_CLOEXEC, 0, resolve)
    wanted = ctypes.c_char_p(os.fsencode(path))
    for _ in range(_AGAIN):
        try:
            return _call(_OPENAT2, ctypes.c_int(folder), wanted, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
        except BlockingIOError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
    raise OSError(errno.EAGAIN, "files are being renamed all the time", path)


def clone_mount(source: Path | int, attributes: int = 0, *, recursive: bool = False) -> int:
    """What is seen at a directory or file (or is open as a descriptor), as a mount of its own that is nowhere yet. A
    link is not followed."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    if isinstance(source, int):
        where, path = source, b""
        flags |= _AT_EMPTY_PATH
    else:
        where, path = AT_FDCWD, os.fsencode(source)
        flags |= _AT_SYMLINK_NOFOLLOW
    mount = _call(_OPEN_TREE, ctypes.c_int(where), ctypes.c_char_p(path), ctypes.c_uint(flags))
    try:
        change_mount(mount, attributes, recursive=recursive)
    except BaseException:
        os.close(mount)
        raise
    return mount


def change_mount(
    mount: int, attributes: int, *, namespace: int | None = None, recursive: bool = False, shared: bool = False
) -> None:
    """`namespace`: a user namespace (see `id_map`) through whose eyes the owners of files are seen. `shared`: what is
    mounted there is mounted where it is followed, too; it is private otherwise, from now on."""
    wanted = _Attributes(attributes, 0, _MS_SHARED if shared else _MS_PRIVATE, 0)
    if namespace is not None:
        wanted.set |= _IDMAP
        wanted.namespace = namespace
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _call(
        _MOUNT_SETATTR,
        *(ctypes.c_int(mount), ctypes.c_char_p(b""), ctypes.c_uint(flags)),
        *(ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted))),
    )


def attach_mount(mount: int, target: Path | int) -> None:
    """Over a directory or file; a link there is not followed."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    if isinstance(target, int):
        where, path = target, b""
        flags |= 0x40  # MOVE_MOUNT_T_EMPTY_PATH
    else:
        where, path = AT_FDCWD, os.fsencode(target)
    _call(
        _MOVE_MOUNT,
        *(ctypes.c_int(mount), ctypes.c_char_p(b"")),
        *(ctypes.c_int(where), ctypes.c_char_p(path), ctypes.c_uint(flags)),
    )


@contextlib.contextmanager
def id_map(users: Sequence[Span], groups: Sequence[Span] | None = None) -> Iterator[int]:
    """A user namespace that stands for a mapping, as a descriptor. Groups are mapped like users unless they are given.

    A namespace needs a process to begin with. It is one that never runs a line of Python: libc's `_exit`, in our memory
    and on a stack of its own, all signals blocked. What is left of it until we wait for it still has the namespace,
    and nothing else of ours: if it lived on without us, so would our sockets and locks, which the next daemon wants.
    """
    stack = ctypes.create_string_buffer(_STACK)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK) & ~0xF)
    function = ctypes.cast(_libc["_exit"], ctypes.c_void_p)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = _libc.clone(function, top, ctypes.c_int(_CLONE_VM | _CLONE_NEWUSER), None)
        code = ctypes.get_errno()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid < 0:
        raise OSError(code, f"no user namespace: {os.strerror(code)}")
    try:
        for name, spans in (("uid_map", users), ("gid_map", users if groups is None else groups)):
            lines = "".join(f"{span.stored} {span.shown} {span.count}\n" for span in spans)
            with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
                file.write(lines.encode())
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.waitpid(pid, _WAIT_ALL)
    try:
        yield namespace
    finally:
        os.close(namespace)
