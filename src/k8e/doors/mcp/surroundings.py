"""What a bridge says about where it was started, in the first line of its input, before the agent's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.doors.mcp.fronts import Surroundings
from k8e.doors.mcp.stream import Pieces
from k8e.doors.specs import Fields, decode_object

LINE: Final = 1 << 20


class Begun:
    """Pieces of which some were read already."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._rest = b""

    async def read_line(self) -> bytes:
        while b"\n" not in self._rest:
            piece = await self._pieces.read_piece()
            if piece is None or len(self._rest) > LINE:
                raise Fault(Kind.INVALID, "invalid_json", "the first line is not there, or too long")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def read_piece(self) -> bytes | None:
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        return await self._pieces.read_piece()

    async def send_piece(self, data: bytes) -> None:
        await self._pieces.send_piece(data)


def read_surroundings(line: bytes, known: Surroundings) -> Surroundings:
    fields = Fields(decode_object(line))
    names = fields.take_texts("names") or []
    environ, permissive = fields.take_mapping("environ"), fields.take_flag("allow_permissive")
    fields.finish()
    return replace(known, names=frozenset(names), environ=environ, allow_permissive=permissive)
