"""Figures that a program has shown: the backend of matplotlib inside a sandbox saves each as a file and prints a line
that names it (k8e_figures.py of the local engine). Where no such line is printed, nothing is asked of the sandbox.

A sandbox may print any line: it names a file of that sandbox, which the caller may read anyway.
"""

from __future__ import annotations

import re
from typing import Final

from k8e.core.errors import Fault
from k8e.core.model import Chunk
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.tools.tool import ImageContent

MAX_FIGURES: Final = 8  # of one run
MAX_FIGURE: Final = 2 << 20  # bytes
_MARK: Final = b"k8e: figure saved as "
_LINE: Final = re.compile(re.escape(_MARK) + rb"(/tmp/k8e-figures/[0-9a-z-]{1,64}\.png)\r?")
_LONGEST: Final = 256
_PNG: Final = b"\x89PNG\r\n\x1a\n"


class FigureNotices:
    """Finds these lines in the output of one run."""

    def __init__(self) -> None:
        self.paths: list[str] = []  # of the first ones: a program can print any number
        self.count = 0
        self._begun = {1: b"", 2: b""}  # the last line of each stream, as far as it has come

    def feed(self, chunk: Chunk) -> None:
        text = self._begun[chunk.stream] + chunk.data
        whole, _, begun = text.rpartition(b"\n")
        self._begun[chunk.stream] = begun[-_LONGEST:]
        if _MARK in whole:
            found = [match[1] for line in whole.split(b"\n") if (match := _LINE.fullmatch(line))]
            self.count += len(found)
            self.paths += [path.decode("ascii") for path in found[: MAX_FIGURES - len(self.paths)]]


async def read_figures(client: McpClient, session_id: str, paths: list[str]) -> tuple[ImageContent, ...]:
    """Those that are there, and are images of a size that clients can show."""
    figures = []
    for path in paths:
        content = bytearray()
        try:
            pieces = await client.service.files.download(client.caller, session_id, path, length=MAX_FIGURE + 1)
            async for piece in pieces:
                content += piece
        except Fault:
            continue  # the answer says how many are left out
        if len(content) <= MAX_FIGURE and content.startswith(_PNG):
            figures.append(ImageContent(bytes(content), "image/png"))
    return tuple(figures)
