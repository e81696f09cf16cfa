"""Routes of the HTTP door: the method, path and content types of each, and the handler that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from k8e.doors.http.errors import HttpRefusal
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.requests import read_meant

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
LINES: Final = "application/x-ndjson"
SESSIONS: Final = ("v1", "sessions")
RUNS: Final = ("v1", "runs")

Handler = Callable[[Exchange, Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: tuple[str, ...]  # "*" is any one part
    handler: Handler
    takes: tuple[str, ...] = ()  # content types; a form's are never among them

    def fits(self, path: tuple[str, ...]) -> bool:
        """A path that is as long."""
        for part, given in zip(self.path, path, strict=True):  # noqa: SIM110 - a generator costs every request more
            if part not in ("*", given):
                return False
        return True


class Handlers(Protocol):
    """The handlers of one noun."""

    @property
    def routes(self) -> tuple[Route, ...]: ...


class Router:
    def __init__(self, handlers: Iterable[Handlers]) -> None:
        self.routes = tuple(route for each in handlers for route in each.routes)
        self._by_kind: dict[tuple[str, int], list[Route]] = {}  # by method and length
        for route in self.routes:
            self._by_kind.setdefault((route.method, len(route.path)), []).append(route)

    async def answer(self, exchange: Exchange, request: Request) -> None:
        route = self._find(request)
        if route.takes and request.content_type not in route.takes:
            error, hint = "the request's content type is not taken here", f"send {' or '.join(route.takes)}"
            raise HttpRefusal(415, "content_type", error, hint=hint)
        if not route.takes:
            await exchange.read_body(request, limit=0)
        narrows = "tenant_id" in request.query or "owner" in request.query
        if narrows and request.path[:2] == SESSIONS and (len(request.path) > 2 or request.method == "GET"):
            query = dict(request.query)
            meant = read_meant(query.pop("tenant_id", ""), query.pop("owner", ""))
            request = replace(request, query=query)
            exchange.caller = replace(exchange.caller, meant=meant)
        await route.handler(exchange, request)

    def _find(self, request: Request) -> Route:
        length = len(request.path)
        for route in self._by_kind.get((request.method, length), ()):
            if route.fits(request.path):
                return route
        if not any(route.fits(request.path) for route in self.routes if len(route.path) == length):
            hint = "docs/http-api.md lists them"
            raise HttpRefusal(404, "no_such_endpoint", "there is nothing at this address", hint=hint)
        raise HttpRefusal(
            405,
            "method_not_allowed",
            f"{request.method} is not possible here",
            hint="docs/http-api.md has the requests",
        )
