"""Sessions, runs, warm sandboxes and approvals as the store keeps them, and their way into rows and back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from k8e.core.model import (
    NONE_DENIED,
    Approval,
    ApprovalStatus,
    Denial,
    Denials,
    Phase,
    RunResult,
    Session,
    Status,
)
from k8e.core.sessions.kinship import Lineage, parse_lineage, write_lineage
from k8e.engine import PLAIN, Limits, Mount, Runtime, Shape
from k8e.policy import NOTHING, HostList, InvalidEntry


@dataclass(frozen=True, slots=True)
class SessionRecord:
    sandbox: str  # the engine's name for it, never used twice
    session_id: str
    tenant: str
    owner: int
    phase: Phase
    runtime: Runtime
    image: str
    limits: Limits
    env_keys: tuple[str, ...]
    created: float
    last_used: float
    ttl: float
    boot: str  # within which `used_at` means something
    used_at: float  # monotonic
    reason: str = ""  # why it ended
    hosts: HostList = NOTHING  # what it may reach
    parent: str = ""  # the sandbox of the session it is a child of: a session's id may be used again, this never
    parent_id: str = ""  # that session's id
    persistent: bool = False
    shape: Shape = PLAIN
    labels: Mapping[str, str] = field(default_factory=dict)
    secret_keys: tuple[str, ...] = ()  # those of env_keys whose values are never kept
    fleeting: bool = False  # there for one command, and gone with it (once.py)
    workdir: str = ""  # where its commands start that say nothing; empty: the workspace
    digest: str = "host"  # of the image, when it was made: what the name means may change

    def show(self) -> Session:
        return Session(
            session_id=self.session_id,
            tenant=self.tenant,
            owner=self.owner,
            phase=self.phase,
            runtime=self.runtime,
            image=self.image,
            limits=self.limits,
            env_keys=self.env_keys,
            created=self.created,
            last_used=self.last_used,
            ttl=self.ttl,
            hosts=self.hosts,
            parent=self.parent_id,
            persistent=self.persistent,
            shape=self.shape,
            labels=self.labels,
            workdir=self.workdir,
            secret_keys=self.secret_keys,
        )


def write_session(record: SessionRecord) -> tuple[object, ...]:
    return (
        record.sandbox,
        record.session_id,
        record.tenant,
        record.owner,
        record.phase.value,
        record.runtime.value,
        record.image,
        json.dumps(asdict(record.limits)),
        json.dumps(record.env_keys),
        record.created,
        record.last_used,
        record.ttl,
        record.boot,
        record.used_at,
        record.reason,
        write_hosts(record.hosts),
        record.parent,
        record.persistent,
        write_shape(record.shape),
        json.dumps(dict(record.labels)),
        record.fleeting,
        record.parent_id,
        record.workdir,
        record.digest,
        json.dumps(record.secret_keys),
    )


def write_shape(shape: Shape) -> str:
    return json.dumps(asdict(shape)) if shape != PLAIN else ""


def read_shape(text: str) -> Shape:
    if not text:
        return PLAIN
    value = json.loads(text)
    mounts = [{**each, "kept": tuple(each["kept"]), "hidden": tuple(each["hidden"])} for each in value.pop("mounts")]
    slots = tuple(value.pop("slots", ()))
    return Shape(mounts=tuple(Mount(**each) for each in mounts), slots=slots, **value)


def write_hosts(hosts: HostList) -> str:
    return json.dumps(hosts.texts)


def read_hosts(text: str) -> HostList:
    """What an earlier version allowed to be listed and this one does not is off the list: no session gets more."""
    hosts = NOTHING
    for entry in json.loads(text):
        with contextlib.suppress(InvalidEntry):
            hosts = hosts.plus(HostList.parse([entry]))
    return hosts


def read_session(row: tuple[Any, ...]) -> SessionRecord:
    sandbox, session_id, tenant, owner, phase, runtime, image, limits, env_keys, *rest = row
    created, last_used, ttl, boot, used_at, reason, hosts, parent, persistent, shape, labels, *more = rest
    fleeting, parent_id, workdir, digest, withheld = more
    return SessionRecord(
        sandbox=sandbox,
        session_id=session_id,
        tenant=tenant,
        owner=owner,
        phase=Phase(phase),
        runtime=Runtime(runtime),
        image=image,
        limits=Limits(**json.loads(limits)),
        env_keys=tuple(json.loads(env_keys)),
        created=created,
        last_used=last_used,
        ttl=ttl,
        boot=boot,
        used_at=used_at,
        reason=reason,
        hosts=read_hosts(hosts),
        parent=parent,
        parent_id=parent_id,
        persistent=bool(persistent),
        shape=read_shape(shape),
        labels=json.loads(labels),
        fleeting=bool(fleeting),
        workdir=workdir,
        digest=digest,
        secret_keys=tuple(json.loads(withheld)),
    )


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


def write_run(run: RunRecord) -> tuple[object, ...]:
    return (
        run.run_id,
        run.sandbox,
        None if run.command is None else str(run.command),  # SQLite's integers have a sign
        run.background,
        run.started,
        run.finished,
        run.status.value,
        run.exit_code,
        run.stdout_bytes,
        run.stderr_bytes,
        run.truncated,
        run.duration_ms,
        run.kept_stdout,
        run.kept_stderr,
        run.oom_before,
        write_denials(run.denied),
    )


def write_denials(denials: Denials) -> str:
    return json.dumps(asdict(denials)) if denials.entries or denials.more else ""


def read_denials(text: str) -> Denials:
    if not text:
        return Denials()
    value = json.loads(text)
    return Denials(tuple(Denial(**entry) for entry in value["entries"]), value["more"])


def read_run(row: tuple[Any, ...]) -> RunRecord:
    run_id, sandbox, command, background, started, finished, status, exit_code, *counts = row
    stdout_bytes, stderr_bytes, truncated, duration_ms, kept_stdout, kept_stderr, oom_before, denied = counts
    return RunRecord(
        run_id=run_id,
        sandbox=sandbox,
        background=bool(background),
        started=started,
        oom_before=oom_before,
        command=None if command is None else int(command),
        finished=finished,
        status=Status(status),
        exit_code=exit_code,
        stdout_bytes=stdout_bytes,
        stderr_bytes=stderr_bytes,
        truncated=bool(truncated),
        duration_ms=duration_ms,
        kept_stdout=kept_stdout,
        kept_stderr=kept_stderr,
        denied=read_denials(denied),
    )


@dataclass(frozen=True, slots=True)
class WarmRecord:
    """A sandbox that is nobody's yet."""

    sandbox: str
    runtime: Runtime
    image: str
    limits: Limits
    edition: str  # what it was made of, in the engine's words
    ready: bool  # False while it is made, and again from when it is to be destroyed
    shape: Shape = PLAIN


def write_warm(record: WarmRecord) -> tuple[object, ...]:
    limits = json.dumps(asdict(record.limits))
    shape = write_shape(record.shape)
    return record.sandbox, record.runtime.value, record.image, limits, record.edition, record.ready, shape


def read_warm(row: tuple[Any, ...]) -> WarmRecord:
    sandbox, runtime, image, limits, edition, ready, shape = row
    return WarmRecord(
        sandbox, Runtime(runtime), image, Limits(**json.loads(limits)), edition, bool(ready), read_shape(shape)
    )


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """A name for an image, and whose it is."""

    owner: int
    tenant: str
    name: str  # canonical
    digest: str
    added: float
    last_used: float


def read_image(row: tuple[Any, ...]) -> ImageRecord:
    return ImageRecord(*row)


def write_image(record: ImageRecord) -> tuple[object, ...]:
    return record.owner, record.tenant, record.name, record.digest, record.added, record.last_used


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


def write_approval(record: ApprovalRecord) -> tuple[object, ...]:
    return (
        record.approval_id,
        record.sandbox,
        record.session_id,
        record.tenant,
        record.owner,
        record.action,
        record.asker,
        write_lineage(record.lineage),
        record.asked,
        record.expires,
        record.boot,
        record.deadline,
        record.status.value,
        record.answerer,
        record.answered,
        record.reason,
    )


def read_approval(row: tuple[Any, ...]) -> ApprovalRecord:
    approval_id, sandbox, session_id, tenant, owner, action, asker, lineage, *rest = row
    asked, expires, boot, deadline, status, answerer, answered, reason = rest
    return ApprovalRecord(
        approval_id=approval_id,
        sandbox=sandbox,
        session_id=session_id,
        tenant=tenant,
        owner=owner,
        action=action,
        asker=asker,
        lineage=parse_lineage(lineage),
        asked=asked,
        expires=expires,
        boot=boot,
        deadline=deadline,
        status=ApprovalStatus(status),
        answerer=answerer,
        answered=answered,
        reason=reason,
    )
