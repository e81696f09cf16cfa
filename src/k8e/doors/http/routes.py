"""Which request is whose: the service's own, and those of whoever else answers at this door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from k8e.core.contract import SandboxService
from k8e.core.model import Caller
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.errors import HttpRefusal
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.handlers.files import Files
from k8e.doors.http.handlers.runs import Runs
from k8e.doors.http.handlers.sessions import Sessions
from k8e.doors.http.handlers.trees import Trees
from k8e.doors.http.requests import read_meant
from k8e.doors.http.route import Route

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Answerer(Protocol):
    @property
    def routes(self) -> tuple[Route, ...]: ...


class Gateway(Protocol):
    def describe(self) -> Json:
        """Where it is, or why it is not."""


class Routes:
    def __init__(
        self,
        service: SandboxService,
        render_metrics: Callable[[], str],
        *others: Answerer,
        gateway: Gateway | None = None,
    ) -> None:
        self._service = service
        self._render_metrics = render_metrics
        self._gateway = gateway
        answerers: tuple[Answerer, ...] = (
            Sessions(service),
            Runs(service),
            Files(service.files),
            Trees(service.files),
            *others,
        )
        self._table = (
            Route("GET", ("healthz",), self._tell_health),
            Route("GET", ("metrics",), self._tell_metrics),
            Route("GET", ("v1", "status"), self._tell_status),
            *(route for answerer in answerers for route in answerer.routes),
        )

    def turn_away(self, caller: Caller, call: str, refusal: HttpRefusal) -> None:
        self._service.turn_away(caller.label, call, refusal.code)

    async def answer(self, exchange: Exchange, request: Request) -> None:
        candidates = [route for route in self._table if route.fits(request.path)]
        if not candidates:
            raise HttpRefusal(
                404, "no_such_endpoint", "there is nothing at this address", hint="docs/http-api.md lists them"
            )
        for route in candidates:
            if route.method == request.method:
                break
        else:
            raise HttpRefusal(405, "method_not_allowed", f"{request.method} is not possible here")
        if route.takes and request.content_type not in route.takes:
            wanted = " or ".join(route.takes)
            raise HttpRefusal(
                415, "content_type", "the request's content type is not taken here", hint=f"send {wanted}"
            )
        if not route.takes:
            await exchange.read_body(request, limit=0)
        if request.path[:2] == ("v1", "sessions") and (len(request.path) > 2 or request.method == "GET"):
            query, meant = read_meant(request.query)
            request = replace(request, query=query)
            exchange.caller = replace(exchange.caller, meant=meant)
        await route.handler(exchange, request)

    async def _tell_health(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_json(200, {"ok": True})

    async def _tell_metrics(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_bytes(200, self._render_metrics().encode(), PROMETHEUS)

    async def _tell_status(self, exchange: Exchange, request: Request) -> None:
        status = answers.show_status(await self._service.status(exchange.caller))
        gateway = {"gateway": self._gateway.describe()} if self._gateway else {}
        await exchange.send_json(200, {**status, **gateway})
