"""Warm sandboxes over HTTP, for `agentkernel daemon prewarm` and `status`."""

from __future__ import annotations

from dataclasses import replace

from k8e.core.contract import SandboxService, WarmService
from k8e.core.model import PoolStatus
from k8e.doors.http import requests
from k8e.doors.http.answers import Json, pick
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.routes import JSON, Route


class WarmHandlers:
    def __init__(self, warm: WarmService, service: SandboxService) -> None:
        self._warm = warm
        self._service = service

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", ("v1", "pool"), self.get),
            Route("POST", ("v1", "pool"), self.reserve, (JSON,)),
        )

    async def get(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_json(200, show_pool(await self._warm.status(exchange.caller)))

    async def reserve(self, exchange: Exchange, request: Request) -> None:
        """`name` and `count`; the rest describes a session, as in a create, with `slots` in place of `mounts`."""
        fields = await exchange.read_fields(request)
        name, number = fields.take_text("name"), fields.take_count("count", 1)
        slots = tuple(fields.take_texts("slots") or ())
        spec = requests.read_session_spec(fields, self._service.default_limits)
        spec = replace(spec, shape=replace(spec.shape, slots=slots))
        await exchange.send_json(200, show_pool(await self._warm.reserve(exchange.caller, name, spec, number)))


def show_pool(status: PoolStatus) -> Json:
    return {
        "enabled": status.enabled,
        "max": status.most,
        "warm": status.warm,
        "reservations": [
            {
                "name": each.name,
                "runtime": each.runtime.value,
                **pick(each, "image", "asked", "wanted", "ready", "trouble"),
            }
            for each in status.reservations
        ],
    }
