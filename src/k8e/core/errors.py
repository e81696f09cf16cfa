"""Every error a user can meet: a stable code, the cause, the next step.

Doors translate `Fault.kind` into their own status (HTTP, gRPC, exit codes) and nothing else.

    NOT_FOUND       there is no such session, run or file here (or it is somebody else's)
    INVALID         the request is wrong; `field` names where
    CONFLICT        the id is taken, or it is in a state that does not allow this
    UNAVAILABLE     asked for something that this machine does not have (a runtime), or cannot give now
    EXHAUSTED       a quota or limit is reached
    DENIED          known, and not allowed
    FAILED          it was tried and did not work (git clone, a control that could not be applied)
    LOST            it ran, and how it ended is not known
    STRANGER        who calls is not known, or not any more
    NOT_YET         this version cannot do it
"""

from __future__ import annotations

import enum

from k8e.core.model import NONE_DENIED, Denials


class Kind(enum.Enum):
    NOT_FOUND = "not_found"
    INVALID = "invalid"
    CONFLICT = "conflict"
    UNAVAILABLE = "unavailable"
    EXHAUSTED = "exhausted"
    DENIED = "denied"
    FAILED = "failed"
    LOST = "lost"
    STRANGER = "stranger"
    NOT_YET = "not_yet"


class Fault(Exception):
    """`code` is snake_case and never changes once released; `error` is for people, `hint` says what to do next.

    `denied` is what the sandbox was refused, where that may be why. `retry_after` are seconds after which it may work;
    0 when waiting does not help, or nobody knows.
    """

    def __init__(
        self,
        kind: Kind,
        code: str,
        error: str,
        *,
        detail: str = "",
        hint: str = "",
        field: str = "",
        retry_after: float = 0,
        denied: Denials = NONE_DENIED,
    ) -> None:
        self.kind = kind
        self.code = code
        self.error = error
        self.detail = detail
        self.hint = hint
        self.field = field
        self.retry_after = retry_after
        self.denied = denied
        super().__init__(f"{code}: {error}" + (f" ({detail})" if detail else ""))
