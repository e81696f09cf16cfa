"""Errors as gRPC tells them: a table from core's kinds to status codes, and details in the trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc

from k8e.core.errors import Fault, Kind
from k8e.core.model import Denials
from k8e.doors.errors import INTERNAL_ERROR, INTERNAL_HINT
from k8e.doors.grpc.answers import show_denials
from k8e.doors.grpc.sandbox_pb2 import ErrorDetail
from k8e.errors import ExplainedError

CODES: Final[Mapping[Kind, grpc.StatusCode]] = {
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Kind.FAILED: grpc.StatusCode.ABORTED,
    Kind.LOST: grpc.StatusCode.DATA_LOSS,
    Kind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}
_EXISTS: Final = ("session_exists", "key_exists", "file_exists")
# Trailers have to fit into 8 KiB, in base64, beside the status' own text: the most bytes of each text, which may quote
# the request, and of all with the denials.
_TEXT: Final = 700
_TRAILER: Final = 4000


class GrpcRefusal(ExplainedError):
    """The door refuses or ends a call without an answer of core."""

    def __init__(self, status: grpc.StatusCode, code: str, error: str, *, detail: str = "", hint: str) -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.status = status


def describe(problem: Fault | GrpcRefusal) -> tuple[grpc.StatusCode, ErrorDetail]:
    detail = ErrorDetail(
        code=problem.code, error=_show(problem.error), detail=_show(problem.detail), hint=_show(problem.hint)
    )
    if isinstance(problem, GrpcRefusal):
        return problem.status, detail
    detail.field = _show(problem.field)[:100]
    detail.retry_after = problem.retry_after
    detail.run_id = problem.run_id
    _add_denials(detail, problem.denied)
    if problem.code in _EXISTS:
        return grpc.StatusCode.ALREADY_EXISTS, detail
    return CODES[problem.kind], detail


def _show(text: str) -> str:
    """Shortens a text and makes it valid UTF-8, whatever it quotes."""
    return text.encode("utf-8", "replace")[:_TEXT].decode("utf-8", "ignore")


def _add_denials(detail: ErrorDetail, denials: Denials) -> None:
    shown = show_denials(denials)
    detail.denied_more = denials.more
    for number, refusal in enumerate(shown):
        if detail.ByteSize() + refusal.ByteSize() > _TRAILER:
            detail.denied_more += len(shown) - number
            return
        detail.denied.append(refusal)


def malformed(error: str) -> GrpcRefusal:
    return GrpcRefusal(
        grpc.StatusCode.INVALID_ARGUMENT, "bad_request", error, hint="proto/sandbox/v1/sandbox.proto has the messages"
    )


def too_slow() -> GrpcRefusal:
    hint = "Give it a longer deadline; what takes its time can run in the background."
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    return GrpcRefusal(status, "deadline_exceeded", "the call took longer than it may", hint=hint)


def stalled(seconds: float) -> GrpcRefusal:
    error, hint = f"a message did not come in {seconds:g} seconds", "Send it in smaller pieces, and without pauses."
    return GrpcRefusal(grpc.StatusCode.DEADLINE_EXCEEDED, "message_stalled", error, hint=hint)


def internal_error() -> GrpcRefusal:
    return GrpcRefusal(grpc.StatusCode.INTERNAL, "internal", INTERNAL_ERROR, hint=INTERNAL_HINT)
