"""The whole output of runs whose result was truncated, as resources that live as long as the connection.

They are files without a name: the kernel removes them with the daemon, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import IO, Final

from k8e.core.sandbox.output import HeadTail

EACH: Final = 16 << 20  # bytes kept of one stream; those after them are only counted
ALL: Final = 64 << 20  # bytes kept for one connection; the oldest resources make room


class OutputRecorder:
    """Keeps the beginning and the end of one stream, and all of it in a file once these two are not the whole."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shown = HeadTail(limit)
        self._file: IO[bytes] | None = None
        self._size = 0
        self._full = False

    def feed(self, content: bytes) -> None:
        if self._file is None and self._shown.total + len(content) > self._limit:
            self._file = tempfile.TemporaryFile(prefix="k8e-mcp-")  # noqa: SIM115 - lives as long as the recorder
            self._write(self._shown.take())
        if self._file is not None:
            self._write(content)
        self._shown.feed(content)

    def _write(self, content: bytes) -> None:
        """In the event loop: the write goes to the page cache and costs no more than a copy."""
        if self._file is None or self._full:
            return
        try:
            self._size += os.write(self._file.fileno(), content[: EACH - self._size])
        except OSError:
            self._full = True  # no space left; what is written can still be read
        self._full |= self._size >= EACH

    def take(self) -> bytes:
        return self._shown.take()

    @property
    def total(self) -> int:
        return self._shown.total

    def keep(self) -> OutputResource | None:
        """None: the result has the whole stream."""
        return None if self._file is None else OutputResource(self._file, self._size, self.total)

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class OutputResource:
    file: IO[bytes]
    size: int
    total: int  # of the stream

    def read(self) -> bytes:
        return os.pread(self.file.fileno(), self.size, 0)


class OutputResources:
    def __init__(self) -> None:
        self._outputs: dict[str, OutputResource] = {}

    @property
    def entries(self) -> dict[str, OutputResource]:
        return dict(self._outputs)

    def add(self, run_id: str, stream: str, output: OutputResource) -> str:
        """Returns the resource's URI."""
        uri = f"k8e://runs/{run_id}/{stream}"
        self._outputs[uri] = output
        while sum(each.size for each in self._outputs.values()) > ALL:
            self._outputs.pop(next(iter(self._outputs))).file.close()
        return uri

    def find(self, uri: str) -> OutputResource | None:
        return self._outputs.get(uri)

    def close(self) -> None:
        for output in self._outputs.values():
            output.file.close()
        self._outputs.clear()
