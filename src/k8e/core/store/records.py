"""Sessions, runs, warm sandboxes, images and approvals as the store keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from k8e.core.access.lineage import Lineage
from k8e.core.model import NONE_DENIED, Approval, ApprovalStatus, Denials, RunResult, Session, Status
from k8e.engine import PLAIN, Limits, Runtime, Shape


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session, and what only the daemon knows of it."""

    sandbox: str  # the engine's name for it, never used twice
    session: Session
    boot: str  # within which `used_at` means something
    used_at: float  # monotonic
    reason: str = ""  # why it ended
    parent_sandbox: str = ""  # of the session it is a child of: a session's id may be used again, this never
    fleeting: bool = False  # there for one command, and gone with it (once.py)
    digest: str = "host"  # of the image, when it was made: what the name means may change


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: str
    sandbox: str
    background: bool
    started: float
    oom_before: int = 0  # kills by the kernel in this sandbox before the run
    command: int | None = None  # the agent's id, 64 bits
    finished: float | None = None
    status: Status = Status.RUNNING
    exit_code: int | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    duration_ms: int = 0
    kept_stdout: int | None = None  # bytes of output kept in the sandbox
    kept_stderr: int | None = None
    denied: Denials = NONE_DENIED

    def show(self, session_id: str, stdout: bytes = b"", stderr: bytes = b"") -> RunResult:
        return RunResult(
            run_id=self.run_id,
            session_id=session_id,
            status=self.status,
            exit_code=self.exit_code,
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=self.stdout_bytes,
            stderr_bytes=self.stderr_bytes,
            truncated=self.truncated,
            duration_ms=self.duration_ms,
            denied=self.denied,
        )


@dataclass(frozen=True, slots=True)
class WarmRecord:
    """A warm sandbox: it belongs to no session yet."""

    sandbox: str
    runtime: Runtime
    image: str
    limits: Limits
    edition: str  # what it was made of, in the engine's words
    ready: bool  # False while it is made, and again from when it is to be destroyed
    shape: Shape = PLAIN


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """A name for an image, and whose it is."""

    owner: int
    tenant: str
    name: str  # canonical
    digest: str
    added: float
    last_used: float


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    approval_id: str
    sandbox: str
    session_id: str
    tenant: str
    owner: int
    action: str
    asker: str
    lineage: Lineage  # of the process that asked
    asked: float
    expires: float  # for people
    boot: str  # within which `deadline` means something
    deadline: float  # monotonic
    status: ApprovalStatus = ApprovalStatus.PENDING
    answerer: str = ""
    answered: float | None = None
    reason: str = ""

    def show(self) -> Approval:
        return Approval(
            approval_id=self.approval_id,
            session_id=self.session_id,
            tenant=self.tenant,
            action=self.action,
            status=self.status,
            asker=self.asker,
            asked=self.asked,
            expires=self.expires,
            answerer=self.answerer,
            answered=self.answered,
            reason=self.reason,
        )
