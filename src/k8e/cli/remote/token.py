"""The token of a service account, sent with each call. Its file is read anew each time, because it is renewed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from k8e.cli.process import Failure

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


def _unreadable(cause: str) -> Failure:
    hint = "it names a file with a service account's token that you can read"
    return Failure("token_unreadable", "K8E_SANDBOX_TOKEN_FILE cannot be read", detail=cause, hint=hint)


class TokenChannel:
    """A channel whose calls have the token in their metadata. The standalone program does not have gRPC's own way."""

    def __init__(self, channel: Any, path: str) -> None:
        self._channel = channel
        self._path = path
        self.close = channel.close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def unary_unary(self, *method: Any) -> Callable[..., Any]:
        return self._add_token(self._channel.unary_unary(*method))

    def unary_stream(self, *method: Any) -> Callable[..., Any]:
        return self._add_token(self._channel.unary_stream(*method))

    def stream_unary(self, *method: Any) -> Callable[..., Any]:
        return self._add_token(self._channel.stream_unary(*method))

    def stream_stream(self, *method: Any) -> Callable[..., Any]:
        return self._add_token(self._channel.stream_stream(*method))

    def _add_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def begin(sent: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            token = ("authorization", f"Bearer {read_token(self._path)}")
            return call(sent, timeout=timeout, metadata=(*metadata, token))

        return begin
