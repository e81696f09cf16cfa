"""All of an output that was too long for its result, kept as long as the connection lives, within bounds.

In files without a name: the kernel forgets them with the daemon, whatever happens to it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import IO, Final

from k8e.core.sandbox.output import HeadTail

EACH: Final = 16 << 20  # of one stream; what comes after is counted and not kept
ALL: Final = 64 << 20  # of one connection; the oldest make room


class Recorder:
    """One stream: its beginning and its end, and all of it from the moment that these are not the same."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shown = HeadTail(limit)
        self._file: IO[bytes] | None = None
        self._size = 0
        self._full = False

    def feed(self, content: bytes) -> None:
        if self._file is None and self._shown.total + len(content) > self._limit:
            self._file = tempfile.TemporaryFile(prefix="k8e-mcp-")  # noqa: SIM115 - lives as long as we do
            self._write(self._shown.take())
        if self._file is not None:
            self._write(content)
        self._shown.feed(content)

    def _write(self, content: bytes) -> None:
        """To the page cache, a piece at a time: no worse than copying it."""
        if self._file is None or self._full:
            return
        try:
            self._size += os.write(self._file.fileno(), content[: EACH - self._size])
        except OSError:
            self._full = True  # the disk is; what there is can still be read
        self._full |= self._size >= EACH

    def take(self) -> bytes:
        return self._shown.take()

    @property
    def total(self) -> int:
        return self._shown.total

    def keep(self) -> Kept | None:
        """None: the result has all of it."""
        return None if self._file is None else Kept(self._file, self._size, self.total)

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class Kept:
    file: IO[bytes]
    size: int
    total: int  # of the stream

    def read(self) -> bytes:
        return os.pread(self.file.fileno(), self.size, 0)


class Outputs:
    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    @property
    def entries(self) -> dict[str, Kept]:
        return dict(self._kept)

    def add(self, run_id: str, stream: str, kept: Kept) -> str:
        """The resource's name."""
        name = f"k8e://runs/{run_id}/{stream}"
        self._kept[name] = kept
        while sum(each.size for each in self._kept.values()) > ALL:
            self._kept.pop(next(iter(self._kept))).file.close()
        return name

    def find(self, name: str) -> Kept | None:
        return self._kept.get(name)

    def close(self) -> None:
        for kept in self._kept.values():
            kept.file.close()
        self._kept.clear()
