"""Changes the owners of the files of a disk that is not mounted yet, by the inodes in its image.

A native sandbox has a range of user ids of its own, to which its files must belong. To walk through the mounted disk
with chown takes half as long as the runtime's start, mostly waiting for inodes to be read; in the image they lie side
by side, and a template's are found once. Only an image that mkfs has just written is read here, never one that a
sandbox could have written to, and an image of an unexpected layout is not changed: the walk does that one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SUPERBLOCK: Final = 1024
_MAGIC: Final = 0xEF53
_KNOWN_INCOMPAT: Final = 0x02 | 0x40 | 0x80 | 0x200  # filetype, extents, 64bit, flex_bg
_METADATA_CSUM: Final = 0x400  # each inode has a checksum of its own
_INODE_UNINIT: Final = 0x1
# Offsets in an inode: the high halves of its ids, side by side.
_UID_HIGH, _GID_HIGH = 120, 122
_HIGH_HALVES: Final = struct.Struct("<HH")


class UnknownLayout(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of an inode table in which there are inodes in use. A range of ids begins at a multiple of 65536, and no
    id of a template is larger: so only the high halves change, which are the same for all. They are left out here."""

    offset: int  # in the image
    pieces: tuple[bytes, ...]

    def shifted(self, first_id: int) -> bytes:
        """One call for all inodes: to change one after the other took as long as the copy of the whole template."""
        if first_id & 0xFFFF:
            raise ValueError(f"no range of ids begins at {first_id}")
        return _HIGH_HALVES.pack(first_id >> 16, first_id >> 16).join(self.pieces)


def read_stretches(image: Path) -> tuple[Stretch, ...]:
    """Reads an ext4 that mkfs made and that was never mounted. Raises UnknownLayout if it is not one that we know."""
    with image.open("rb") as file:
        return tuple(_find_stretches(file.fileno()))


def shift_owners(file: int, stretches: tuple[Stretch, ...], first_id: int) -> None:
    """Moves every file of a copy into the range that begins there."""
    for stretch in stretches:
        content = stretch.shifted(first_id)
        if os.pwrite(file, content, stretch.offset) != len(content):
            raise OSError("the image was not written to its end")


def _find_stretches(file: int) -> Iterator[Stretch]:
    superblock = os.pread(file, 1024, _SUPERBLOCK)
    if len(superblock) < 1024:
        raise UnknownLayout("no superblock")

    def field(kind: str, offset: int) -> int:
        value: int = struct.unpack_from(f"<{kind}", superblock, offset)[0]
        return value

    incompat, ro_compat = field("I", 0x60), field("I", 0x64)
    if field("H", 0x38) != _MAGIC or incompat & ~_KNOWN_INCOMPAT or ro_compat & _METADATA_CSUM:
        raise UnknownLayout(f"features {incompat:#x}, {ro_compat:#x}")
    block, inode_size, per_group = 1024 << field("I", 0x18), field("H", 0x58), field("I", 0x28)
    wide = bool(incompat & 0x80)
    descriptor_size = field("H", 0xFE) if wide else 32
    groups = -(-field("I", 0x0) // per_group)
    table = os.pread(file, groups * descriptor_size, (field("I", 0x14) + 1) * block)
    if inode_size < 128 or len(table) < groups * descriptor_size:
        raise UnknownLayout(f"inodes of {inode_size} bytes, {groups} groups")
    used = 0
    for group in range(groups):
        descriptor = table[group * descriptor_size : (group + 1) * descriptor_size]
        if struct.unpack_from("<H", descriptor, 0x12)[0] & _INODE_UNINIT:
            continue
        bitmap = os.pread(file, -(-per_group // 8), _block_number(descriptor, 0x4, 0x24, wide) * block)
        stretch = _read_stretch(file, bitmap, _block_number(descriptor, 0x8, 0x28, wide) * block, inode_size, per_group)
        used += bitmap_count(bitmap, per_group)
        if len(stretch.pieces) > 1:
            yield stretch
    if used != field("I", 0x0) - field("I", 0x10):
        raise UnknownLayout(f"{used} inodes found in use, which is not what the superblock says")


def _block_number(descriptor: bytes, low: int, high: int, wide: bool) -> int:
    number: int = struct.unpack_from("<I", descriptor, low)[0]
    return number | struct.unpack_from("<I", descriptor, high)[0] << 32 if wide else number


def bitmap_count(bitmap: bytes, length: int) -> int:
    return (int.from_bytes(bitmap, "little") & ((1 << length) - 1)).bit_count()


def _read_stretch(file: int, bitmap: bytes, offset: int, size: int, per_group: int) -> Stretch:
    numbers = [number for number in range(per_group) if bitmap[number >> 3] >> (number & 7) & 1]
    content = os.pread(file, (numbers[-1] + 1) * size, offset) if numbers else b""
    pieces, begin = [], 0
    for number in numbers:
        at = number * size
        links, *high = (struct.unpack_from("<H", content, at + field)[0] for field in (0x1A, _UID_HIGH, _GID_HIGH))
        if links:  # those that ext4 keeps for itself have none
            if any(high):
                raise UnknownLayout("a file belongs to an id that is no 16-bit one")
            pieces.append(content[begin : at + _UID_HIGH])
            begin = at + _UID_HIGH + _HIGH_HALVES.size
    return Stretch(offset, (*pieces, content[begin:]))
