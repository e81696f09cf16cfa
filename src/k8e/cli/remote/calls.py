"""Calls of a gateway's methods, one after the other on one channel. No call is made twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from k8e.cli.client import Answer, SessionName
from k8e.cli.process import Failure
from k8e.cli.remote import connection
from k8e.doors.grpc.methods import METHODS, OWNER_KEY, TENANT_KEY
from k8e.profiles.text import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8e.cli.remote.discovery import Target


class RemoteCalls:
    def __init__(self, target: Target) -> None:
        self.place = target.place
        self.endpoint = target.endpoint
        self._channel = connection.open_channel(target.endpoint, target.roots, target.key, target.certificate)

    def _ask(self, name: str, message: Any, session: SessionName | None = None, *, seconds: float = 120.0) -> Any:
        """A call that changes nothing."""
        return self._call(name, message, session, seconds=seconds, harmless=True)

    def _call(
        self,
        name: str,
        message: Any,
        session: SessionName | None = None,
        *,
        seconds: float = 120.0,
        harmless: bool = False,
    ) -> Any:
        method = METHODS[name]
        call = self._channel.unary_unary(method.path, serialize, method.response.FromString)
        try:
            return call(message, timeout=seconds, metadata=name_owner(session))
        except grpc.RpcError as error:
            raise connection.explain(self.endpoint, error, harmless=harmless) from error

    def _explain(self, error: Any) -> Failure:
        return connection.explain(self.endpoint, error, harmless=False)


def write(value: Mapping[str, Any], exit_code: int | None = None) -> Answer:
    return Answer(to_json(value), exit_code)


DONE: Final = write({"ok": True})


def name_owner(session: SessionName | None) -> tuple[tuple[str, str], ...]:
    """Whose session is meant, as metadata. Metadata is plain ASCII; what is not, is no tenant's name either."""
    if session is None:
        return ()
    said = [(TENANT_KEY, session.tenant_id), (OWNER_KEY, session.owner)]
    return tuple(
        (key, "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in value))
        for key, value in said
        if value
    )


def serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
