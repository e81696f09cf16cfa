"""Every error a user can meet: a stable code, the cause, the next step.

Doors translate `Fault.kind` into their own status (HTTP, gRPC, exit codes) and nothing else.

    NOT_FOUND       there is no such session, run or file here (or it is another caller's)
    INVALID         the request is wrong; `field` names where
    CONFLICT        the id is taken, or it is in a state that does not allow this
    UNAVAILABLE     asked for something that this machine does not have (a runtime), or cannot give now
    EXHAUSTED       a quota or limit is reached
    DENIED          known, and not allowed
    FAILED          it was tried and did not work (git clone, a control that could not be applied)
    LOST            it ran, and how it ended is not known
    UNAUTHENTICATED the caller is not known, or not any more
"""

from __future__ import annotations

import enum

from k8e.core.model import NONE_DENIED, Denials
from k8e.errors import ExplainedError


class Kind(enum.Enum):
    NOT_FOUND = "not_found"
    INVALID = "invalid"
    CONFLICT = "conflict"
    UNAVAILABLE = "unavailable"
    EXHAUSTED = "exhausted"
    DENIED = "denied"
    FAILED = "failed"
    LOST = "lost"
    UNAUTHENTICATED = "unauthenticated"


def correct(field: str) -> str:
    """The next step where an argument is wrong and nothing better is known than what the error says."""
    return f"Nothing was done. Correct {field or 'the request'} and send it again."


class Fault(ExplainedError):
    """`field` names the wrong part of the request. `denied` lists what the sandbox was refused, where that may be the
    cause. `retry_after` is a number of seconds after which a retry may work; 0 when waiting does not help. `run_id`
    names the run whose end is not known.
    """

    def __init__(
        self,
        kind: Kind,
        code: str,
        error: str,
        *,
        detail: str = "",
        hint: str,
        field: str = "",
        retry_after: float = 0,
        denied: Denials = NONE_DENIED,
        run_id: str = "",
    ) -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.kind = kind
        self.field = field
        self.retry_after = retry_after
        self.denied = denied
        self.run_id = run_id
