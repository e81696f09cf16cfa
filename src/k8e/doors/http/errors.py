"""Errors as HTTP tells them: a table from core's kinds to statuses, and one JSON body."""

from __future__ import annotations

from k8e.core.errors import Fault, Kind
from k8e.doors.errors import INTERNAL_ERROR, INTERNAL_HINT
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
    Kind.UNAUTHENTICATED: 401,
}


class HttpRefusal(ExplainedError):
    """The door refuses a request that core never sees."""

    def __init__(self, status: int, code: str, error: str, *, detail: str = "", hint: str) -> None:
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
    if problem.run_id:
        body["run_id"] = problem.run_id
    if problem.denied.entries:
        body |= show_denials(problem.denied)
    return STATUS[problem.kind], body


def internal_error() -> HttpRefusal:
    return HttpRefusal(500, "internal", INTERNAL_ERROR, hint=INTERNAL_HINT)


def malformed(error: str, detail: str = "", status: int = 400) -> HttpRefusal:
    return HttpRefusal(status, "bad_request", error, detail=detail, hint="docs/http-api.md has the requests")


def too_slow() -> HttpRefusal:
    return HttpRefusal(408, "too_slow", "the request's body did not come", hint="send it without pauses")


def too_large(limit: int) -> HttpRefusal:
    error = f"the request's body is larger than {limit} bytes"
    return HttpRefusal(413, "message_too_large", error, hint="send less at once")
