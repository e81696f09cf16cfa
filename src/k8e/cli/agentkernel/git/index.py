"""The index of a repository (gitformat-index(5)), rewritten for a sandbox that has one folder of the worktree only."""

from __future__ import annotations

import hashlib
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_STATUS = 40  # bytes of an entry before the object's name
_EXTENDED, _SKIP = 0x4000, 0x4000  # bits: of the flags, and of the further flags


class UnknownIndex(Exception):
    pass


def skip_others(index: bytes, folder: bytes) -> bytes:
    """Marks the entries outside of the folder: git takes them for unchanged, although their files are not there.
    Extensions are left out; git makes them anew."""
    if not index:
        return b""
    try:
        version, count = struct.unpack_from(">4xLL", index)
        size = _find_hash_size(index)
        if index[:4] != b"DIRC" or version not in (2, 3, 4):
            raise UnknownIndex("another version")
        entries = list(_read_entries(index, version, count, size))
    except (struct.error, IndexError, ValueError) as error:
        raise UnknownIndex(str(error)) from error
    content = b"DIRC" + struct.pack(">LL", 3, count)
    parts = [content]
    for status, flags, more, path in entries:
        if not path.startswith(folder + b"/"):
            more |= _SKIP
        flags = flags & ~_EXTENDED | (_EXTENDED if more else 0)
        entry = status + struct.pack(">H", flags) + (struct.pack(">H", more) if more else b"") + path
        parts.append(entry + bytes(8 - len(entry) % 8))
    content = b"".join(parts)
    return content + (hashlib.sha1(content) if size == 20 else hashlib.sha256(content)).digest()


def _find_hash_size(index: bytes) -> int:
    """20 or 32: with SHA-256 the index ends with that of all before."""
    return 32 if hashlib.sha256(index[:-32]).digest() == index[-32:] else 20


def _read_entries(index: bytes, version: int, count: int, size: int) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Yields the status with the object's name, the flags, the further flags, and the path."""
    at, path = 12, b""
    for _ in range(count):
        begin = at
        status = index[at : at + _STATUS + size]
        at += _STATUS + size
        (flags,) = struct.unpack_from(">H", index, at)
        at, more = at + 2, 0
        if flags & _EXTENDED:
            (more,) = struct.unpack_from(">H", index, at)
            at += 2
        if version == 4:
            dropped, at = _read_number(index, at)
            end = index.index(b"\0", at)
            path = path[: len(path) - dropped] + index[at:end]
            at = end + 1
        else:
            end = index.index(b"\0", at)
            path = index[at:end]
            at = begin + (end - begin) // 8 * 8 + 8
        yield status, flags, more, path
    if index[at : at + 4] == b"link":
        raise UnknownIndex("a split index")


def _read_number(index: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, as offsets in packs have it."""
    byte = index[at]
    value = byte & 127
    while byte & 128:
        at += 1
        byte = index[at]
        value = (value + 1) << 7 | byte & 127
    return value, at + 1
