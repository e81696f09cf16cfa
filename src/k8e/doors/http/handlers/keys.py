"""Keys and certificates over HTTP, for `k8e sandbox-apikey` and local SDKs."""

from __future__ import annotations

import os
from typing import Protocol

from k8e.core.access.keys import DEFAULT_TTL, Keys, KeySpec
from k8e.core.errors import Fault
from k8e.core.model import Scope
from k8e.doors.http.answers import Json, show_key, show_new_key
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields
from k8e.doors.http.routes import JSON, Route


class Gateway(Protocol):
    async def endpoint(self) -> str:
        """Opens the gateway if it is not open. Raises Fault."""

    def describe(self) -> Json:
        """Its endpoint, or why it is not open."""


class KeyHandlers:
    def __init__(self, keys: Keys, gateway: Gateway) -> None:
        self._keys = keys
        self._gateway = gateway

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", ("v1", "login"), self.login, (JSON,)),
            Route("POST", ("v1", "keys"), self.create, (JSON,)),
            Route("GET", ("v1", "keys"), self.list),
            Route("DELETE", ("v1", "keys", "*"), self.delete),
        )

    async def login(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        csr = fields.take_text("csr")
        fields.finish()
        issued = await self._keys.login_local(exchange.caller, csr)
        answer = {
            "certificate": issued.certificate,
            "ca_certificate": issued.authority,
            "expires_at": issued.expires,
            "endpoint": await self._gateway.endpoint(),
            "pid": os.getpid(),
        }
        await exchange.send_json(200, answer)

    async def create(self, exchange: Exchange, request: Request) -> None:
        spec = read_key_spec(await exchange.read_fields(request))
        record, text = await self._keys.create(exchange.caller, spec)
        try:
            endpoint = await self._gateway.endpoint()  # where the key is used
        except Fault:
            endpoint = ""  # the daemon log says why
        await exchange.send_json(201, show_new_key(show_key(record), text, endpoint))

    async def list(self, exchange: Exchange, request: Request) -> None:
        records = await self._keys.list(exchange.caller)
        await exchange.send_json(200, {"keys": [show_key(record) for record in records]})

    async def delete(self, exchange: Exchange, request: Request) -> None:
        await self._keys.delete(exchange.caller, request.path[2])
        await exchange.send_json(200, {"ok": True})


def read_key_spec(fields: Fields) -> KeySpec:
    for_ever = fields.take_flag("for_ever")
    spec = KeySpec(
        name=fields.take_text("name"),
        ttl=None if for_ever else fields.take_number("ttl", DEFAULT_TTL),
        scope=fields.take_choice("scope", Scope) or Scope.RUN,
        tenants=tuple(fields.take_texts("tenant_ids") or ()),
    )
    fields.finish()
    return spec
