"""The token of a service account, which a program in a cluster sends with each call. The kubelet writes it into a file
and renews it there, so the file is read anew for each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from sandbox_client._errors import InvalidArgument
from sandbox_client._hints import find_hint

_CODE: Final = "token_unreadable"
_MOST: Final = 8 << 10


def read_token(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            token = file.read(_MOST + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(error)) from error
    if not token or len(token) > _MOST or not token.isprintable() or " " in token:
        raise _unreadable(f"{path} has no token")
    return token


def _unreadable(cause: str) -> InvalidArgument:
    return InvalidArgument("K8E_SANDBOX_TOKEN_FILE cannot be read", code=_CODE, detail=cause, hint=find_hint(_CODE))


class _TokenPlugin(grpc.AuthMetadataPlugin):
    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, context: object, callback: Callable[[Any, Exception | None], None]) -> None:
        """Called in a thread of gRPC, before each call is sent."""
        try:
            callback((("authorization", f"Bearer {read_token(self._path)}"),), None)
        except InvalidArgument as error:
            callback((), error)


def add_token(credentials: grpc.ChannelCredentials, path: str) -> grpc.ChannelCredentials:
    return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_TokenPlugin(path)))
