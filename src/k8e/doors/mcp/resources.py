"""The whole output of runs whose result was cut, as resources that live as long as the connection; without connections,
as long as the server.

They are files without a name: the kernel removes them with the daemon, however it ends.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from typing import IO, Final

from k8e.core.sandbox.output import HeadTail
from k8e.doors.http.answers import Json, text_of

EACH: Final = 16 << 20  # bytes kept of one stream; those after them are only counted
ALL: Final = 64 << 20  # bytes kept for one connection; the oldest resources make room
MOST: Final = 64  # resources of one connection: each holds a descriptor


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

    def show(self, name: str) -> Json:
        """The stream as text. Between its two ends a line says how much is left out; no character is cut in two."""
        shown = self.take()
        if self.total <= self._limit:
            return text_of(name, shown)
        half = self._limit - self._limit // 2
        head, tail = cut_end(shown[:half]), cut_start(shown[half:])
        missing = self.total - len(head) - len(tail)
        line = f"\n[{missing} of {self.total} bytes are left out here]\n".encode()
        return text_of(name, head + line + tail)

    def keep(self) -> OutputResource | None:
        """None: the result has the whole stream."""
        return None if self._file is None else OutputResource(self._file, self._size, self.total)

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()


def cut_end(head: bytes) -> bytes:
    """Without a last character of UTF-8 that is not complete."""
    for length in range(1, min(3, len(head)) + 1):
        lead = head[-length]
        if lead >= 0xC0:
            return head[:-length] if length < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) else head
        if lead < 0x80:
            break
    return head


def cut_start(tail: bytes) -> bytes:
    """Without the rest of a character that began before."""
    return tail[next((index for index, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0) :]


@dataclass(frozen=True, slots=True)
class OutputResource:
    file: IO[bytes]
    size: int
    total: int  # of the stream

    def read(self, offset: int = 0, length: int = EACH) -> bytes:
        return os.pread(self.file.fileno(), max(0, min(length, self.size - offset)), offset)


class OutputResources:
    def __init__(self, *, shared: bool = False) -> None:
        """`shared` by clients that must not see each other: their resources are not listed, and found by a URI that
        cannot be guessed."""
        self._shared = shared
        self._outputs: dict[str, OutputResource] = {}
        self._size = 0

    @property
    def entries(self) -> dict[str, OutputResource]:
        return {} if self._shared else dict(self._outputs)

    def add(self, run_id: str, stream: str, output: OutputResource) -> str:
        """Returns the resource's URI."""
        secret = f"{secrets.token_hex(16)}/" if self._shared else ""
        uri = f"k8e://runs/{secret}{run_id}/{stream}"
        self._outputs[uri] = output
        self._size += output.size
        while self._size > ALL or len(self._outputs) > MOST:
            oldest = self._outputs.pop(next(iter(self._outputs)))
            self._size -= oldest.size
            oldest.file.close()
        return uri

    def find(self, uri: str) -> OutputResource | None:
        return self._outputs.get(uri)

    def close(self) -> None:
        for output in self._outputs.values():
            output.file.close()
        self._outputs.clear()
        self._size = 0
