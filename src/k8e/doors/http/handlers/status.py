"""The daemon's health, metrics and status over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from k8e.core.access.access import find_scope
from k8e.core.contract import SandboxService
from k8e.doors.http.answers import show_caller, show_status
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.handlers.keys import Gateway
from k8e.doors.http.routes import Route

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class StatusHandlers:
    def __init__(
        self, service: SandboxService, render_metrics: Callable[[], str], gateway: Gateway | None = None
    ) -> None:
        self._service = service
        self._render_metrics = render_metrics
        self._gateway = gateway

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", ("healthz",), self.get_health),
            Route("GET", ("metrics",), self.get_metrics),
            Route("GET", ("v1", "status"), self.get_status),
        )

    async def get_health(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_json(200, {"ok": True})

    async def get_metrics(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_bytes(200, self._render_metrics().encode(), PROMETHEUS)

    async def get_status(self, exchange: Exchange, request: Request) -> None:
        caller = exchange.caller
        status = show_status(await self._service.status(caller))
        who = show_caller(caller.name or caller.label, caller.tenant, find_scope(caller).value)
        gateway = {"gateway": self._gateway.describe()} if self._gateway else {}
        await exchange.send_json(200, {**status, **who, **gateway})
