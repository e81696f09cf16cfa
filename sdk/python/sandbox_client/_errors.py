"""The errors of the client. The class follows from the status code by a table here, never from a name that came over
the wire.

    SandboxError                 code, error, detail, hint, field, retry_after
    ├─ InvalidArgument           the request is wrong; `field` says where
    │   └─ NotText               the file is no UTF-8 text: read_bytes takes it
    ├─ NotFound                  no such session, run or file, or it belongs to another caller
    ├─ Conflict                  the id is taken, or the state does not allow it
    ├─ PermissionDenied          known, and not allowed
    ├─ Unauthenticated           the key or certificate does not count (any more)
    ├─ ResourceExhausted         a quota; `retry_after` says when it may work
    ├─ Unsupported               this gateway cannot do that
    ├─ Unavailable               cannot be reached, or this machine does not have it: nothing ran
    │   └─ ServerNotTrusted      not the gateway that it should be: nothing was sent
    ├─ Failed                    it was tried and did not work
    ├─ DeadlineExceeded          no answer in time
    ├─ RunLost                   it ran, and how it ended is not known
    └─ InternalError             a bug on the other side
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

DETAIL = "sandbox-error-bin"
# gRPC says one status for a connection that never came to be and for one that broke; these are its words for the first.
# Any other text counts as broken, so that a command that may have run is never called one that did not.
NEVER_SENT = ("failed to connect", "connections to all backends failing", "dns resolution failed")


class SandboxError(Exception):
    """`code` is stable and for programs, `error` for people; `hint` says what to do next."""

    def __init__(
        self,
        error: str,
        *,
        code: str = "",
        detail: str = "",
        hint: str = "",
        field: str = "",
        retry_after: float = 0.0,
    ) -> None:
        self.error = error
        self.code = code
        self.detail = detail
        self.hint = hint
        self.field = field
        self.retry_after = retry_after
        super().__init__(": ".join(part for part in (error, detail) if part) + (f" ({hint})" if hint else ""))


class InvalidArgument(SandboxError, ValueError):
    pass


class NotText(InvalidArgument):
    pass


class NotFound(SandboxError):
    pass


class Conflict(SandboxError):
    pass


class PermissionDenied(SandboxError):
    pass


class Unauthenticated(SandboxError):
    pass


class ResourceExhausted(SandboxError):
    pass


class Unsupported(SandboxError):
    pass


class Unavailable(SandboxError):
    pass


class ServerNotTrusted(Unavailable):
    pass


class Failed(SandboxError):
    pass


class DeadlineExceeded(SandboxError, TimeoutError):
    pass


class RunLost(SandboxError):
    pass


class InternalError(SandboxError):
    pass


_BY_STATUS: dict[grpc.StatusCode, type[SandboxError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: Conflict,
    grpc.StatusCode.ABORTED: Failed,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: RunLost,
}


def translate(error: grpc.RpcError, *, runs: bool = False) -> SandboxError:
    """A call's failure as one of ours. What the gateway says about it is text and numbers, nothing else. `runs`: the
    call was to run a command."""
    from sandbox_client.sandbox_pb2 import ErrorDetail

    status = error.code()
    kind = _BY_STATUS.get(status, InternalError)
    said = str(error.details() or "")
    for key, value in cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ()):
        if key == DETAIL:
            try:
                found = ErrorDetail.FromString(value)
            except Exception:  # noqa: BLE001 - protobuf raises what it likes; an answer that cannot be read says nothing
                break
            return kind(
                found.error or said,
                code=found.code,
                detail=found.detail,
                hint=found.hint,
                field=found.field,
                retry_after=found.retry_after,
            )
    if runs and status is grpc.StatusCode.UNAVAILABLE and not any(words in said.lower() for words in NEVER_SENT):
        hint = "the command may have run, and may still: look at the log of the session"
        return RunLost("the gateway went away before it had answered", code="run_lost", detail=said, hint=hint)
    if status is grpc.StatusCode.UNAVAILABLE and ("certificate" in said.lower() or "handshake failed" in said.lower()):
        hint = "the address answers with another certificate than the one this client trusts: check address and key"
        return ServerNotTrusted(
            "the server is not the gateway that it should be", code="server_not_trusted", detail=said, hint=hint
        )
    code = status.name.lower()
    return kind(said or code, code=code)
