"""The errors of the client. The class follows from the status code by a table here, never from a name that came over
the wire.

    SandboxError                 code, error, detail, hint, field, retry_after, run_id
    ├─ InvalidArgument           the request is wrong; `field` says where
    │   └─ NotText               the file is no UTF-8 text: read_bytes takes it
    ├─ NotFound                  no such session, run or file, or it belongs to another caller
    ├─ Conflict                  the id is taken, or the state does not allow it
    ├─ PermissionDenied          known, and not allowed
    ├─ Unauthenticated           the key or certificate does not count (any more)
    ├─ ResourceExhausted         a quota; `retry_after` says when it may work
    ├─ Unsupported               this gateway cannot do that
    ├─ Unavailable               cannot be reached, or this machine does not have it: nothing was done
    │   └─ ServerNotTrusted      not the gateway that it should be: nothing was sent
    ├─ Failed                    it was tried and did not work
    ├─ OutcomeUnknown            the answer is lost: it may have been done
    │   ├─ RunLost               the command ran or may have run, and how it ended is not known
    │   └─ DeadlineExceeded      no answer in time
    └─ InternalError             a bug on the other side
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, cast

import grpc

from sandbox_client._hints import find_hint

if TYPE_CHECKING:
    from collections.abc import Iterable

DETAIL = "sandbox-error-bin"
# gRPC says one status for a connection that never came to be and for one that broke; these are its words for the first.
# Any other text counts as broken, so that a command that may have run is never called one that did not.
NEVER_SENT = ("failed to connect", "connections to all backends failing", "dns resolution failed")
NO_TOKEN: Final = "metadata from plugin failed"  # gRPC's words when _token.py has none: nothing was sent
UNREACHABLE: Final = "unreachable"  # nothing was sent
CONNECTION_LOST: Final = "connection_lost"  # it was sent, and the answer did not come


class Effect(enum.Enum):
    """What a call does at the gateway, which decides what a lost answer means."""

    ASKS = "asks"  # nothing changes, however often it is called
    CHANGES = "changes"
    RUNS = "runs"  # a command


_ASKS: Final = frozenset(
    (
        *("GetSession", "ListSessions", "PollRun", "Ps", "Log", "ReadFile", "DownloadFile", "ListFiles"),
        *("GetTree", "ListApprovals", "ListImages", "Status"),
    )
)
_RUNS: Final = frozenset(("Exec", "ExecStream", "ExecInteractive", "PipInstall"))


def find_effect(method: str) -> Effect:
    """A method that is not known here changes something."""
    if method in _RUNS:
        return Effect.RUNS
    return Effect.ASKS if method in _ASKS else Effect.CHANGES


class SandboxError(Exception):
    """Any error of the client. `code` is stable and for programs, `error` for people; `hint` says what to do next,
    `field` which argument is wrong, `retry_after` in how many seconds it may work, `run_id` which run it is about."""

    def __init__(
        self,
        error: str,
        *,
        code: str = "",
        detail: str = "",
        hint: str = "",
        field: str = "",
        retry_after: float = 0.0,
        run_id: str = "",
    ) -> None:
        self.error = error
        self.code = code
        self.detail = detail
        self.hint = hint
        self.field = field
        self.retry_after = retry_after
        self.run_id = run_id
        super().__init__(": ".join(part for part in (error, detail) if part) + (f" ({hint})" if hint else ""))


class InvalidArgument(SandboxError, ValueError):
    """The request is wrong; `field` says where. Nothing was done."""


class NotText(InvalidArgument):
    """The file is not text in UTF-8; `read_bytes` reads it."""


class NotFound(SandboxError):
    """There is no such session, run or file, or it belongs to another caller. Nothing was done."""


class Conflict(SandboxError):
    """The id is taken, or the state of the session, run or approval does not allow it. Nothing was done."""


class PermissionDenied(SandboxError):
    """The caller is known and may not do that, or the sandbox's own file system refuses."""


class Unauthenticated(SandboxError):
    """The API key or the certificate is not valid, or not any more. Nothing was done."""


class ResourceExhausted(SandboxError):
    """A quota or a limit is reached; `retry_after` says when it may work."""


class Unsupported(SandboxError):
    """The gateway does not know this call: it is older than this client."""


class Unavailable(SandboxError):
    """The gateway cannot be reached, or the machine does not have what was asked for. Nothing was done."""


class ServerNotTrusted(Unavailable):
    """The server is not the gateway that it should be. Nothing was sent."""


class Failed(SandboxError):
    """It was tried and did not work."""


class OutcomeUnknown(SandboxError):
    """The request was sent and its answer is lost: it may have been carried out. Look before you send it again."""


class RunLost(OutcomeUnknown):
    """The command ran or may have run, and how it ended is not known. `run_id` names the run, where its id is known."""


class DeadlineExceeded(OutcomeUnknown, TimeoutError):
    """There was no answer in time. A command may have run; the gateway ends it when its caller has left."""


class InternalError(SandboxError):
    """The gateway met an error of its own; its log has the cause."""


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
# gRPC's own ends of a call that was sent: they say nothing about what the gateway did.
_BROKEN: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


def translate(error: grpc.RpcError, effect: Effect, run_id: str = "") -> SandboxError:
    """A call's failure as one of ours. What the gateway says about it is text and numbers, nothing else. `run_id`: of
    the run that the call had begun, where it was told."""
    from sandbox_client.sandbox_pb2 import ErrorDetail

    status = error.code()
    said = str(error.details() or "")
    for key, value in cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ()):
        if key == DETAIL:
            try:
                found = ErrorDetail.FromString(value)
            except Exception:  # noqa: BLE001 - protobuf raises what it likes; an answer that cannot be read says nothing
                break
            kind = _BY_STATUS.get(status, InternalError)
            if kind is RunLost and effect is not Effect.RUNS:
                kind = OutcomeUnknown
            return kind(
                found.error or said,
                code=found.code,
                detail=found.detail,
                hint=find_hint(found.code, found.hint),
                field=found.field,
                retry_after=found.retry_after,
                run_id=found.run_id or run_id,
            )
    return _translate_connection(status, said, effect, run_id)


def _translate_connection(status: grpc.StatusCode, said: str, effect: Effect, run_id: str) -> SandboxError:
    """gRPC's own failure, without a word of the gateway."""
    text = said.lower()
    never_sent = any(words in text for words in NEVER_SENT)
    if status is grpc.StatusCode.UNAVAILABLE and ("certificate" in text or "handshake failed" in text):
        error = "the server is not the gateway that it should be"
        code = "server_not_trusted"
        return ServerNotTrusted(error, code=code, detail=said, hint=find_hint(code))
    if status is grpc.StatusCode.UNAVAILABLE and never_sent:
        error = "the gateway cannot be reached"
        return Unavailable(error, code=UNREACHABLE, detail=said, hint=find_hint(UNREACHABLE))
    if status is grpc.StatusCode.UNAVAILABLE and NO_TOKEN in text:
        code = "token_unreadable"
        return InvalidArgument("the token cannot be read any more", code=code, detail=said, hint=find_hint(code))
    if status in _BROKEN:
        error = "the gateway went away before it had answered"
        if effect is Effect.ASKS:
            return Unavailable(error, code=CONNECTION_LOST, detail=said, hint="Ask again.")
        if effect is Effect.CHANGES:
            return OutcomeUnknown(error, code=CONNECTION_LOST, detail=said, hint=find_hint(CONNECTION_LOST))
        return RunLost(error, code="run_lost", detail=said, hint=find_hint("run_lost"), run_id=run_id)
    code = status.name.lower()
    kind = _BY_STATUS.get(status, InternalError)
    return kind(said or code, code=code, hint=find_hint(code), run_id=run_id)
