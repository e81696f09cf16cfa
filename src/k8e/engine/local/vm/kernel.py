"""Takes the kernel out of the file that boot loaders start (bzImage), for VMMs that want the ELF file in it. Pure.

The header of the file says where the packed kernel is (Linux, Documentation/arch/x86/boot.rst): after the sectors of
the set-up code, `payload_offset` further on, `payload_length` long. Its last four bytes are the unpacked length.
"""

from __future__ import annotations

import gzip
import lzma
import struct
from typing import Final

_SECTORS, _MAGIC, _VERSION, _PAYLOAD = 0x1F1, 0x202, 0x206, 0x248
_ELF: Final = b"\x7fELF"
_GZIP, _XZ, _LZ4 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x02\x21\x4c\x18"
_MOST: Final = 256 << 20  # bytes of a kernel


class UnknownKernel(ValueError):
    """It is not what this module can read."""


def extract_elf(image: bytes) -> bytes:
    """Takes some seconds for one that is packed with LZ4."""
    if image[_MAGIC : _MAGIC + 4] != b"HdrS" or int.from_bytes(image[_VERSION : _VERSION + 2], "little") < 0x208:
        raise UnknownKernel("it is no bzImage")
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    begin = ((image[_SECTORS] or 4) + 1) * 512 + offset
    packed = image[begin : begin + length]
    wanted = int.from_bytes(packed[-4:], "little")
    if len(packed) != length or wanted > _MOST:
        raise UnknownKernel("its header is wrong")
    kernel = _unpack(packed[:-4])
    if len(kernel) != wanted or kernel[:4] != _ELF:
        raise UnknownKernel("what it has is no ELF file")
    return kernel


def _unpack(packed: bytes) -> bytes:
    try:
        if packed.startswith(_GZIP):
            return gzip.decompress(packed)
        if packed.startswith(_XZ):
            return lzma.decompress(packed)
        if packed.startswith(_LZ4):
            return unpack_lz4(packed)
    except (OSError, EOFError, lzma.LZMAError, LookupError) as error:
        raise UnknownKernel(f"it is damaged: {error}") from error
    raise UnknownKernel("it is packed in a way that is not known here")


def unpack_lz4(packed: bytes) -> bytes:
    """The format with one magic number and blocks that each have their length before them."""
    out, place = bytearray(), len(_LZ4)
    while place < len(packed):
        length = int.from_bytes(packed[place : place + 4], "little")
        place += 4
        block = packed[place : place + length]
        if len(block) != length:
            raise EOFError("a block is cut short")
        _unpack_block(block, out)
        place += length
    return bytes(out)


def _unpack_block(block: bytes, out: bytearray) -> None:
    """Each sequence is some bytes as they are, and a copy of what was unpacked so far; the last has no copy."""
    place, end = 0, len(block)
    while place < end:
        token = block[place]
        place += 1
        literal, copied = token >> 4, token & 15
        if literal == 15:
            while (more := block[place]) == 255:
                literal += 255
                place += 1
            literal += more
            place += 1
        out += block[place : place + literal]
        place += literal
        if place >= end:
            return
        distance = block[place] | block[place + 1] << 8
        place += 2
        if copied == 15:
            while (more := block[place]) == 255:
                copied += 255
                place += 1
            copied += more
            place += 1
        copied += 4
        start = len(out) - distance
        if not 0 <= start < len(out) or len(out) > _MOST:
            raise EOFError("a copy of what is not there")
        if distance >= copied:
            out += out[start : start + copied]
        else:  # it goes on with what it makes
            piece = bytes(out[start:])
            out += (piece * (copied // distance + 1))[:copied]
