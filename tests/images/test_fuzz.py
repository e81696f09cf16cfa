"""Layers with broken bytes: whatever they are, there is an answer, and nothing beside the layer is touched."""

from __future__ import annotations

import os
import random
import tarfile
import threading
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.local.images.layers import unpack
from k8e.engine.local.images.limits import ImageLimits
from tests.images.builder import entry, link, make_tar
from tests.shares import seed

CASES = int(os.environ.get("K8E_FUZZ_CASES", "600")) // 100
LIMITS = ImageLimits(bytes=16 << 20, entries=10_000)


class Bytes:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, size: int, /) -> bytes:
        piece, self._content = self._content[:size], self._content[size:]
        return piece


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Mostly in headers, and some with a checksum that is right again: else nothing gets past the first check."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 6)):
        block = 512 * chance.randrange(len(data) // 512)
        data[block + chance.choice((0, 1, 100, 108, 124, 136, 156, 157, 263, 345, chance.randrange(512)))] = (
            chance.choice((0, 0x2F, 0x2E, 0x30, 0x37, 0x80, 0xFF, chance.randrange(256)))
        )
        if chance.random() < 0.9:
            header = data[block : block + 512]
            header[148:156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(header)
    return bytes(data[: chance.choice((len(data), len(data), chance.randrange(512, len(data))))])


@pytest.mark.parametrize("turn", range(max(CASES, 1)))
def test_whatever_comes_is_unpacked_or_refused(tmp_path: Path, turn: int) -> None:
    good = make_tar(
        entry("a"),
        entry("a/" + "long" * 40, b"1" * 600),
        link("a/link", "/etc"),
        link("a/hard", "a/" + "long" * 40, tarfile.LNKTYPE),
        entry("a/.wh.x", b""),
        entry("b\u00e9", b"2" * 2000, pax_headers={"mtime": "1.5", "SCHILY.xattr.user.x": "y"}),
        entry(".wh..wh..opq", b""),
    )
    chance = random.Random(seed(f"layers, {turn}"))
    beside = tmp_path / "beside"
    beside.mkdir()
    for number in range(4):
        target = tmp_path / f"layer{number}"
        target.mkdir()
        content = mutate(good, chance)
        try:
            unpack(Bytes(content), len(content), target, LIMITS, threading.Event(), lambda _: None)
        except EngineError as error:
            if error.reason != "refused":
                raise
    assert sorted(os.listdir(tmp_path)) == ["beside", *(f"layer{number}" for number in range(4))]
    assert os.listdir(beside) == []
