"""The ways in which a file can be damaged."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

STRANGER: Final = 54_321
SEED: Final = secrets.randbits(32)  # printed with a failure, as what a test is called with is


def rewrite(path: Path, content: bytes) -> None:
    """As another file of the same name: a program that runs cannot be written to."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode & 0o777)


def empty(path: Path) -> None:
    rewrite(path, b"")


def cut(path: Path) -> None:
    content = path.read_bytes()
    rewrite(path, content[: len(content) // 2])


def garbage(path: Path) -> None:
    rewrite(path, random.Random(SEED).randbytes(min(max(path.stat().st_size, 64), 4 << 20)))


def other_json(path: Path) -> None:
    rewrite(path, b'{"keys": [3], "marks": 5, "slot": "x", "answers": [], "layers": 1}')


def other_owner(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("something")


def unreadable(path: Path) -> None:
    """For root, who may read everything: a link that leads to itself."""
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


WAYS: Final[dict[str, Callable[[Path], None]]] = {
    way.__name__: way for way in (empty, cut, garbage, other_json, other_owner, directory, unreadable, pipe)
}
