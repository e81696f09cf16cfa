"""Calls of a gateway's methods, one after the other on one channel. No call is made twice that may have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from k8e.cli.client import Answer, SessionName
from k8e.cli.process import Failure
from k8e.cli.remote import connection
from k8e.cli.remote.retry import repeat
from k8e.doors.grpc.methods import METHODS, OWNER_KEY, TENANT_KEY
from k8e.profiles.text import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8e.cli.remote.discovery import Target


T = TypeVar("T")


class RemoteCalls:
    def __init__(self, target: Target) -> None:
        self.place = target.place
        self.endpoint = target.endpoint
        self._channel = target.open_channel()
        self._known = target.known

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

        def attempt() -> Any:
            try:
                return call(message, timeout=seconds, metadata=name_owner(session))
            except grpc.RpcError as error:
                raise connection.explain(self.endpoint, error, harmless=harmless) from error

        return self._repeat(attempt)

    def _begin(self, call: Any, sent: Any, session: SessionName, seconds: float | None = None) -> Any:
        """Begins a call whose answers are to come."""
        try:
            return call(sent, timeout=seconds, metadata=name_owner(session))
        except grpc.RpcError as error:  # of the standalone program, which connects at once
            raise self._explain(error) from error

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Again, where it was never sent, or only asks: another gateway may have the address by now."""
        answer = repeat(attempt, known=self._known)
        self._known = True
        return answer

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
