"""One request over HTTP and TCP, as authentication and the transports use it."""

from __future__ import annotations

from dataclasses import dataclass

import h11

from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.mcp.transport.connection import PeerConnection


@dataclass(slots=True)
class HttpCall:
    head: h11.Request
    request: Request
    exchange: Exchange
    connection: PeerConnection
    body: bytes = b""  # once it is read

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def authorization(self) -> list[str]:
        return [value.decode("latin-1") for name, value in self.head.headers if name == b"authorization"]

    def header(self, name: bytes) -> str | None:
        value = self.request.headers.get(name)
        return None if value is None else value.decode("latin-1")
