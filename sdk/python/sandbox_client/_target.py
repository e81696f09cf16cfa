"""Which gateway, and with which identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from sandbox_client._requests import MESSAGE

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MESSAGE + (1 << 20)),
    ("grpc.max_send_message_length", MESSAGE + (1 << 20)),
    ("grpc.enable_retries", 0),  # a command is run once
)


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    authority: bytes | None  # the CA that its certificate must come from; None: those of the system
    certificate: bytes | None
    key: bytes | None
    renew_at: float
    options: tuple[tuple[str, Any], ...] = ()

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def find_target(endpoint: str | None, api_key: str | None, profile: str | None) -> Target:
    raise NotImplementedError
