"""What a registry wants to see before it gives something: the header WWW-Authenticate, taken apart. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LONGEST: Final = 8192
_SCHEME: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)(?:\s+|$)", re.ASCII)
_PAIR: Final = re.compile(r'\s*([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))\s*(?:,|$)', re.ASCII)


@dataclass(frozen=True, slots=True)
class Challenge:
    scheme: str  # in lower case
    values: Mapping[str, str]


def parse_challenge(header: str) -> Challenge | None:
    """The first that we can meet; None when there is none."""
    if len(header) > _LONGEST:
        return None
    position = 0
    while match := _SCHEME.match(header, position):
        scheme, position = match[1].lower(), match.end()
        values: dict[str, str] = {}
        while pair := _PAIR.match(header, position):
            values[pair[1].lower()] = re.sub(r"\\(.)", r"\1", pair[2]) if pair[2] is not None else pair[3]
            position = pair.end()
        if scheme == "basic" or (scheme == "bearer" and values.get("realm")):
            return Challenge(scheme, values)
        if position == match.end():
            return None
    return None
