"""Authentication at a registry: its challenge (the header WWW-Authenticate), its token, our credentials. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from k8e.engine import EngineError
from k8e.engine.images import Credentials

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


def read_token(content: bytes) -> str:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    token = (value.get("token") or value.get("access_token")) if isinstance(value, dict) else None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise EngineError("image", "the registry's token is none", reason="unreachable")
    return token


def write_basic(credentials: Credentials | None) -> str:
    """The header's value; empty without a user name."""
    if credentials is None or not credentials.username:
        return ""
    return "Basic " + base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
