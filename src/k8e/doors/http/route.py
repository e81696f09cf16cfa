"""One address of the HTTP door: what it takes, and who answers. Whoever answers has a tuple of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from k8e.doors.http.exchange import Exchange, Request

JSON = "application/json"
BYTES = "application/octet-stream"
LINES = "application/x-ndjson"
SESSIONS = ("v1", "sessions")
RUNS = ("v1", "runs")

Handler = Callable[[Exchange, Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: tuple[str, ...]  # "*" is any one part
    handler: Handler
    takes: tuple[str, ...] = ()  # content types; a form's are never among them

    def fits(self, path: tuple[str, ...]) -> bool:
        return len(path) == len(self.path) and all(
            part in ("*", given) for part, given in zip(self.path, path, strict=True)
        )
