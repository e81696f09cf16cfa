"""Unpacks one layer. A program of its own, because its input is not trusted and writing it takes root.

Before it reads a byte it has given up everything but the directory that it fills: a mount namespace whose root is that
directory, no network, an unprivileged user, five capabilities, none of which reaches beyond files. Whatever a stream
makes of it can hurt the layer that it is the content of, and nothing else. So it imports nothing of ours and everything
it needs beforehand: where it works there is no library to load.

Standard input is the tar, uncompressed. Standard output is one JSON object per line: directories that hide what
lies below them (`opaque`, base64; marking them takes a capability that it does not have), and last what became of it
(`refused`, or `entries` and `bytes`). Overlayfs' form: what is removed is a character device 0:0.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import stat
import struct
import sys
import tarfile
from typing import IO, Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 8, 24, 38
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "MKNOD": 27}
_CAPABILITY_VERSION = 0x20080522
_NOBODY = 65534
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_PIECE = 1 << 20
_MEMORY = 1 << 30
_LATEST = 1 << 34  # seconds: ext4 has no later time
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_MARKS = b".wh..wh."  # what aufs kept for itself

_libc = ctypes.CDLL(None, use_errno=True)


class Closing:
    """A descriptor, until the end of the block."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __enter__(self) -> int:
        return self._handle

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


class Refused(Exception):
    """The layer is not one that will be unpacked."""


def refuse(cause: str, path: bytes = b"") -> NoReturn:
    raise Refused(f"{path[:200].decode(errors='backslashreplace')!r} {cause}" if path else cause)


# Confinement


def call(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def confine(top: bytes, size: int, seconds: int) -> None:
    call(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET), "unshare")
    mount = _libc.mount
    mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_void_p)
    call(mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount private")
    call(mount(top, top, None, _MS_BIND, None), "bind")
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    call(mount(None, top, None, _MS_BIND | _MS_REMOUNT | flags, None), "remount")
    os.chdir(top)
    call(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    call(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    os.closerange(3, 1 << 16)
    for limit, value in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first by a signal that says so
    os.umask(0)
    drop_privileges()


def drop_privileges() -> None:
    """To a user without rights but for giving files away: so it cannot signal processes of root, either."""
    kept = set(_CAPABILITIES.values())
    for number in range(64):
        if number not in kept:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # those that the kernel does not know fail
    call(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    mask = sum(1 << number for number in kept)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    call(_libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0)), "capset")
    call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    call(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "pdeathsig")  # the change of user has cleared it


# Reading


class Header(tarfile.TarInfo):
    """Strict where the standard library takes a broken header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tarfile_)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            refuse(f"the archive is damaged: {error}")

    def _block(self, count: int) -> int:
        if count < 0:  # older Pythons would go back and read the same for ever
            refuse("the archive has an entry of negative size")
        return super()._block(count)  # type: ignore[misc, no-any-return]


class Layer:
    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._entries = 0
        self._bytes = 0
        self._times: dict[bytes, int] = {}  # of directories, set at the end: what is put into them changes them
        self._opaque: set[bytes] = set()
        self._near: tuple[bytes, int] = (b"", self._root)  # the directory last used, and its descriptor

    def read(self, stream: IO[bytes]) -> None:
        with tarfile.open(
            fileobj=stream, mode="r|", tarinfo=Header, encoding="utf-8", errors="surrogateescape", bufsize=_PIECE
        ) as archive:
            while (member := archive.next()) is not None:
                self._entries += 1
                if self._entries > self._limits["entries"]:
                    refuse(f"has more than {self._limits['entries']} entries")
                self._take(archive, member)
                archive.members.clear()  # type: ignore[attr-defined] # it would keep them all
        while stream.read(_PIECE):
            pass  # padding; the sender expects all of it to be read
        for path in sorted(self._times, reverse=True):
            parent, name = self._split(path)
            with Closing(self._open(parent)) as handle:
                os.utime(name, ns=(self._times[path],) * 2, dir_fd=handle, follow_symlinks=False)

    def report(self) -> list[dict[str, object]]:
        marks: list[dict[str, object]] = [{"opaque": base64.b64encode(path).decode()} for path in sorted(self._opaque)]
        return [*marks, {"entries": self._entries, "bytes": self._bytes}]

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._check_path(encode(member.name))
        if member.size < 0 or member.uid < 0 or member.gid < 0 or max(member.uid, member.gid) >= 0xFFFFFFFF:
            refuse("has numbers that cannot be", path)
        if member.size > self._limits["bytes"]:  # also of what has no content: tarfile would skip as much, for years
            refuse(f"has more than {self._limits['bytes']} bytes", path)
        if member.sparse is not None or member.issparse():
            refuse("is a sparse file, which images do not have", path)
        if not path:
            if not member.isdir():
                refuse("the root of the layer is no directory")
            self._set(self._root, b".", member)
            self._times[b"."] = time_of(member)
            return
        parent, name = self._split(path)
        handle = self._enter(parent)
        if name.startswith(_WHITEOUT):
            self._hide(handle, parent, name)
        elif member.isdir():
            self._make_directory(handle, path, name)
            self._set(handle, name, member)
            self._times[path] = time_of(member)
        else:
            self._clear(handle, path, name)
            self._make(archive, member, handle, path, name)

    def _check_path(self, name: bytes) -> bytes:
        """Relative, without dots; empty is the root."""
        if name.startswith(b"/") and name.strip(b"/"):
            refuse("is an absolute path", name)
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            refuse("leads out of the layer", name)
        if b"\0" in name:
            refuse("has a NUL byte in its name", name)
        if len(name) > self._limits["path"] or any(len(part) > 255 for part in parts):
            refuse("has a name that is too long", name)
        if len(parts) > self._limits["depth"]:
            refuse(f"lies deeper than {self._limits['depth']} directories", name)
        return b"/".join(parts)

    @staticmethod
    def _split(path: bytes) -> tuple[bytes, bytes]:
        if path == b".":
            return b"", b"."
        parent, _, name = path.rpartition(b"/")
        return parent, name

    # Directories

    def _open(self, path: bytes) -> int:
        """One that this layer has made. No link on the way is followed, whatever was put there meanwhile."""
        handle = os.dup(self._root)
        for part in path.split(b"/") if path else ():
            previous = handle
            try:
                handle = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=previous)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    found = look(previous, part)
                    if found is not None and is_whiteout(found):
                        raise FileNotFoundError from None  # removed, and about to be there anew
                    refuse("is written through something that is no directory", path)
                raise
            finally:
                os.close(previous)
        return handle

    def _enter(self, path: bytes) -> int:
        """Stays open until the next one. What is missing on the way is made, root's."""
        near, handle = self._near
        if path == near:
            return handle
        self._leave()
        try:
            handle = self._open(path)
        except FileNotFoundError:
            parent, name = self._split(path)
            above = self._enter(parent)
            self._make_directory(above, path, name)
            os.chown(name, 0, 0, dir_fd=above, follow_symlinks=False)
            self._leave()
            handle = self._open(path)
        self._near = (path, handle)
        return handle

    def _leave(self) -> None:
        _, handle = self._near
        if handle != self._root:
            os.close(handle)
        self._near = (b"", self._root)

    def _make_directory(self, handle: int, path: bytes, name: bytes) -> None:
        found = look(handle, name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            return
        if found is not None and is_whiteout(found):
            self._opaque.add(path)  # what was there is removed, and there is a new one
        if found is not None:
            os.unlink(name, dir_fd=handle)
        os.mkdir(name, 0o755, dir_fd=handle)

    # The others

    def _hide(self, handle: int, parent: bytes, name: bytes) -> None:
        if name == _OPAQUE:
            self._opaque.add(parent)
            return
        if name.startswith(_MARKS):
            return
        hidden = name[len(_WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            refuse("removes what has no name", name)
        found = look(handle, hidden)
        if found is None:
            os.mknod(hidden, stat.S_IFCHR | 0o000, 0, dir_fd=handle)
        elif stat.S_ISDIR(found.st_mode):
            self._opaque.add(parent + b"/" + hidden if parent else hidden)
        # Anything else stands in the place of what is removed anyway.

    def _clear(self, handle: int, path: bytes, name: bytes) -> None:
        """The later of two entries counts, as everywhere; a directory with its content is not lost to one."""
        found = look(handle, name)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            refuse("is a directory and something else", path)
        os.unlink(name, dir_fd=handle)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, handle: int, path: bytes, name: bytes) -> None:
        if member.isreg():
            return self._write(archive, member, handle, path, name)
        if member.islnk():
            return self._link(member, handle, path, name)
        if member.issym():
            target = encode(member.linkname)
            if not target or len(target) > self._limits["path"] or b"\0" in target:
                refuse("is a link to something that is no path", path)
            os.symlink(target, name, dir_fd=handle)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=handle)
        elif member.isdev():
            refuse("is a device", path)
        else:
            refuse(f"is of the unknown type {member.type!r}", path)
        return self._set(handle, name, member)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, handle: int, path: bytes, name: bytes) -> None:
        self._bytes += member.size
        if self._bytes > self._limits["bytes"]:
            refuse(f"has more than {self._limits['bytes']} bytes of files")
        content = archive.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=handle)
        try:
            left = member.size
            while left and content is not None and (piece := content.read(min(left, _PIECE))):
                left -= len(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(file, view) :]
            if left:
                refuse("the archive ends too early", path)
            os.fchown(file, member.uid, member.gid)
            os.fchmod(file, member.mode & 0o7777)  # after the owner, whose change takes the setuid bit away
            os.utime(file, ns=(time_of(member),) * 2)
        finally:
            os.close(file)

    def _link(self, member: tarfile.TarInfo, handle: int, path: bytes, name: bytes) -> None:
        target = self._check_path(encode(member.linkname))
        if not target:
            refuse("is a link to the root", path)
        parent, base = self._split(target)
        try:
            source = self._open(parent)
        except FileNotFoundError:
            refuse("is a hard link to something that is not in the layer", path)
        with Closing(source):
            found = look(source, base)
            if found is None or is_whiteout(found):
                refuse("is a hard link to something that is not in the layer", path)
            if stat.S_ISDIR(found.st_mode):
                refuse("is a hard link to a directory", path)
            os.link(base, name, src_dir_fd=source, dst_dir_fd=handle, follow_symlinks=False)

    def _set(self, handle: int, name: bytes, member: tarfile.TarInfo) -> None:
        os.chown(name, member.uid, member.gid, dir_fd=handle, follow_symlinks=False)
        if not member.issym():
            os.chmod(name, member.mode & 0o7777, dir_fd=handle)
        os.utime(name, ns=(time_of(member),) * 2, dir_fd=handle, follow_symlinks=False)


def encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def look(handle: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_whiteout(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def time_of(member: tarfile.TarInfo) -> int:
    return int(min(max(member.mtime, 0), _LATEST) * 1_000_000_000)


def main(top: str, text: str) -> int:
    limits: dict[str, int] = json.loads(text)
    confine(os.fsencode(top), limits["bytes"], limits["seconds"])
    try:
        layer = Layer(limits)
        layer.read(sys.stdin.buffer)
        lines = layer.report()
    except Refused as refused:
        lines = [{"refused": str(refused)}]
    except (tarfile.TarError, EOFError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        lines = [{"refused": f"the archive is damaged: {str(error) or type(error).__name__}"}]
    except OSError as error:
        lines = [{"failed": os.strerror(error.errno) if error.errno else str(error), "errno": error.errno}]
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
