"""The largest image that is accepted. Above these limits it is a bomb, or not meant to be started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageLimits:
    bytes: int = 16 << 30  # of all files of a layer, and of its archive
    entries: int = 2_000_000
    path: int = 4095
    depth: int = 512
    seconds: int = 1800  # of processor time to unpack a layer
    ratio: int = 400  # unpacked to packed; gzip itself ends at about 1000, programs and text stay below 20
    ratio_from: int = 128 << 20  # bytes unpacked, below which the ratio does no harm
    layers: int = 127  # as other tools have it
    manifest: int = 4 << 20  # bytes of anything that is parsed
    archive_entries: int = 10_000  # of an archive that is imported


USUAL = ImageLimits()
