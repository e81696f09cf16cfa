"""Faults as HTTP knows them: one table, one body."""

from __future__ import annotations

from k8e.core.errors import Fault, Kind
from k8e.doors.http.answers import Json, show_denials
from k8e.errors import ExplainedError

STATUS = {
    Kind.NOT_FOUND: 404,
    Kind.INVALID: 400,
    Kind.CONFLICT: 409,
    Kind.UNAVAILABLE: 503,
    Kind.EXHAUSTED: 429,
    Kind.DENIED: 403,
    Kind.FAILED: 502,
    Kind.LOST: 500,
    Kind.STRANGER: 401,
    Kind.NOT_YET: 501,
}


class HttpRefusal(ExplainedError):
    """The request never reached the service: it is no request that this door takes."""

    def __init__(self, status: int, code: str, error: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.status = status


def describe(problem: Fault | HttpRefusal) -> tuple[int, Json]:
    """The status and the body."""
    body: Json = {**problem.body}
    if isinstance(problem, HttpRefusal):
        return problem.status, body
    if problem.field:
        body["field"] = problem.field
    if problem.retry_after:
        body["retry_after"] = round(problem.retry_after, 3)
    if problem.denied.entries:
        body |= show_denials(problem.denied)
    return STATUS[problem.kind], body


def internal_error() -> HttpRefusal:
    """Deliberately without the cause: that is in the daemon's log, for who runs the daemon."""
    return HttpRefusal(500, "internal", "the daemon met an error of its own", hint="the daemon's log has the details")
