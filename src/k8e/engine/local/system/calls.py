"""The kernel's calls that Python's `os` does not have, by ctypes: nothing else of the engine uses ctypes.

Each function has the name of its call and raises OSError with the errno, and with the path where it was given one. The
unpacker of images (images/unpacker.py) makes calls of its own: it is a program that imports nothing of k8e.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOATIME: Final = 1024
_MS_PRIVATE: Final = 1 << 18
_MS_SHARED: Final = 1 << 20
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
MOUNT_ATTR_RDONLY: Final = 1
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4
_MOUNT_ATTR_IDMAP: Final = 0x100000
CLONE_FS: Final = 0x200
CLONE_NEWNS: Final = 0x20000
CLONE_NEWNET: Final = 0x40000000
_CLONE_VM: Final = 0x100
_CLONE_NEWUSER: Final = 0x10000000
AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x04
_MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_IN_ROOT: Final = 0x10
_RESOLVE_ATTEMPTS: Final = 128  # the kernel answers EAGAIN when anything was renamed meanwhile, anywhere
_SECCOMP_SET_MODE_FILTER: Final = 1
_CAPABILITY_VERSION: Final = 0x20080522
_STACK: Final = 64 << 10
_WALL: Final = 0x40000000  # waits also for a child that sends no signal when it ends

# Calls without a function in libc, and setgroups, whose function there changes every thread of the process.
_NUMBERS: Final = {
    "x86_64": {"setgroups": 116, "seccomp": 317},
    "aarch64": {"setgroups": 159, "seccomp": 277},
}.get(os.uname().machine, {}) | {"open_tree": 428, "move_mount": 429, "openat2": 437, "mount_setattr": 442}

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
PATH: Final = os.O_PATH | os.O_NOFOLLOW  # names a file or directory without opening it
PATH_OF_DIRECTORY: Final = PATH | os.O_DIRECTORY
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_UNPLAIN = re.compile(rb"[ \t\n\\]")  # what the kernel escapes in the mount table

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, path: str | Path = "") -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path)) if path else OSError(code, os.strerror(code))
    return result


def _syscall(name: str, *arguments: object, path: str | Path = "") -> int:
    words = (ctypes.c_long(word) if isinstance(word, int) else word for word in arguments)
    return _check(_libc.syscall(ctypes.c_long(_NUMBERS[name]), *words), path)


# Mounts ---------------------------------------------------------------------------------------------------------------


def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    words = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*words), target)


def umount2(target: Path, flags: int) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def open_tree(source: Path | int, *, recursive: bool = False) -> int:
    """Clones what is mounted at a path, or open as a descriptor, as a mount that is attached nowhere. Does not follow a
    link."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    if isinstance(source, int):
        return _syscall("open_tree", source, b"", flags | _AT_EMPTY_PATH)
    return _syscall("open_tree", AT_FDCWD, os.fsencode(source), flags | _AT_SYMLINK_NOFOLLOW, path=source)


def mount_setattr(
    tree: int, attributes: int, *, user_namespace: int | None = None, recursive: bool = False, shared: bool = False
) -> None:
    """Sets attributes of a mount that is open. `user_namespace` maps the owners of its files. `shared`: what is mounted
    there later is mounted in its slaves, too; otherwise the mount is private from now on."""
    mapped = 0 if user_namespace is None else _MOUNT_ATTR_IDMAP
    propagation = _MS_SHARED if shared else _MS_PRIVATE
    wanted = struct.pack("4Q", attributes | mapped, 0, propagation, user_namespace or 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _syscall("mount_setattr", tree, b"", flags, wanted, len(wanted))


def move_mount(tree: int, target: Path | int) -> None:
    """Attaches a mount over a directory or file. Does not follow a link."""
    if isinstance(target, int):
        _syscall("move_mount", tree, b"", target, b"", _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH)
    else:
        _syscall("move_mount", tree, b"", AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH, path=target)


# Files ----------------------------------------------------------------------------------------------------------------


def openat2(folder: int, path: str, flags: int, resolve: int) -> int:
    wanted = struct.pack("3Q", flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(_RESOLVE_ATTEMPTS):
        try:
            return _syscall("openat2", folder, os.fsencode(path), wanted, len(wanted), path=path)
        except BlockingIOError:
            continue
    raise OSError(errno.EAGAIN, "files are being renamed all the time", path)


def syncfs(descriptor: int) -> None:
    _check(_libc.syncfs(descriptor))


# Namespaces -----------------------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def setns(namespace: int, kind: int) -> None:
    _check(_libc.setns(namespace, kind))


@contextlib.contextmanager
def new_user_namespace() -> Iterator[int]:
    """Yields the pid of a process that has a user namespace of its own until the end of the block.

    It never runs a line of Python: it is libc's `_exit`, in our memory and on a stack of its own, all signals blocked.
    Until it is waited for, what is left of it still has the namespace, and nothing else of ours: if it lived on
    without us, so would our sockets and locks, which the next daemon wants.
    """
    stack = ctypes.create_string_buffer(_STACK)  # it may begin to run on it late: kept until it was waited for
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK) & ~0xF)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        function = ctypes.cast(_libc["_exit"], ctypes.c_void_p)
        pid = _check(_libc.clone(function, top, _CLONE_VM | _CLONE_NEWUSER, None))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield pid
    finally:
        os.waitpid(pid, _WALL)
        del stack


# Rights of the calling thread -----------------------------------------------------------------------------------------


def setgroups(groups: Sequence[int]) -> None:
    """Sets those of this thread only."""
    _syscall("setgroups", len(groups), struct.pack(f"{len(groups)}I", *groups))


def setfsuid(uid: int) -> None:
    _set_file_id(_libc.setfsuid, uid)


def setfsgid(gid: int) -> None:
    _set_file_id(_libc.setfsgid, gid)


def _set_file_id(call: Callable[[ctypes.c_uint32], int], wanted: int) -> None:
    call(ctypes.c_uint32(wanted))
    if call(ctypes.c_uint32(0xFFFFFFFF)) != wanted:  # which changes nothing and returns the present one
        raise PermissionError(errno.EPERM, f"cannot act as {wanted}")


def drop_capabilities() -> None:
    _check(_libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)))


def seccomp(program: bytes) -> None:
    """Puts the calling thread under a filter in classic BPF, and every process that this thread starts. There is no way
    back."""
    lines = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    _syscall("seccomp", _SECCOMP_SET_MODE_FILTER, 0, described)


def read_ticks() -> int:
    """Reads the processor's time stamp counter (x86 only), with the one instruction that does it."""
    with contextlib.closing(
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    ) as page:
        page.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
        place = ctypes.c_char.from_buffer(page)
        ticks: int = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(place))()
        del place
    return ticks


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened(
    path: str | Path, flags: int, *, folder: int | None = None, mode: int = 0o600
) -> contextlib.AbstractContextManager[int]:
    """Opens a file, below `folder` if one is given. Programs that are started meanwhile do not inherit it."""
    return closing(os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=folder))


@dataclass(frozen=True, slots=True)
class MountEntry:
    point: Path
    kind: str  # of filesystem


def parse_mounts(text: bytes) -> list[MountEntry]:
    found = []
    for line in text.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        if separator:
            found.append(MountEntry(_unescape(before.split(b" ")[4]), os.fsdecode(after.split(b" ")[0])))
    return found


def read_mounts() -> list[MountEntry]:
    """Reads the mount table. Names are bytes: a disk labelled in Latin-1 must not keep sandboxes from being
    destroyed."""
    return parse_mounts(_read_table())


def read_mounts_below(top: Path) -> list[Path]:
    """Lists the mount points at and below a directory. Of the others, and there may be a thousand, nothing is parsed:
    the end of every sandbox looks several times."""
    wanted = _UNPLAIN.sub(lambda match: b"\\%03o" % ord(match[0]), os.fsencode(top))
    table = _read_table()
    if wanted not in table:
        return []
    points = (line.split(b" ", 5)[4] for line in table.split(b"\n") if wanted in line)
    return [_unescape(point) for point in points if point == wanted or point.startswith(wanted + b"/")]


def _read_table() -> bytes:
    return Path("/proc/self/mountinfo").read_bytes()


def _unescape(point: bytes) -> Path:
    return Path(os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), point)))
