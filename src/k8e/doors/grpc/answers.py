"""Turns core's answers into messages."""

from __future__ import annotations

from dataclasses import asdict

from k8e.core.access.access import find_scope
from k8e.core.access.keys import Certificate
from k8e.core.contract import LiveTerminal
from k8e.core.model import Approval, Caller, Denials, NamedImage, RunResult, ServiceStatus, Session
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.http.answers import pick
from k8e.identity.register import KeyRecord
from k8e.link.model import CommandInfo, Entry


def show_text(content: bytes) -> tuple[str, bytes]:
    """Readable text, and the exact bytes where they are not UTF-8."""
    try:
        return content.decode(), b""
    except UnicodeDecodeError:
        return content.decode(errors="replace"), content


def clean(text: str) -> str:
    """Makes text that a sandbox influenced valid UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def show_denials(denials: Denials) -> list[pb.Refusal]:
    return [
        pb.Refusal(
            host=clean(denial.host),
            address=clean(denial.address),
            port=denial.port,
            reason=denial.reason,
            hint=clean(denial.hint),
            at=denial.at,
            entry=clean(denial.entry),
        )
        for denial in denials.entries
    ]


def show_session(session: Session) -> pb.Session:
    return pb.Session(
        **pick(session, "session_id", "image", "env_keys", "owner", "created", "last_used", "ttl"),
        **pick(session, "children", "labels", "persistent", "secret_keys", "emulated"),
        tenant_id=session.tenant,
        phase=session.phase.value,
        runtime_class=session.runtime.value,
        limits=pb.Limits(**asdict(session.limits)),
        allowed_hosts=session.hosts.texts,
        denied=show_denials(session.denied),
        denied_more=session.denied.more,
        parent_session_id=session.parent,
        read_only=session.shape.read_only,
        powerless=session.shape.powerless,
        load=pb.Load(**asdict(session.load)) if session.load else None,
    )


def show_run(run: RunResult) -> pb.ExecResponse:
    return pb.ExecResponse(
        **pick(run, "stdout", "stderr", "stdout_bytes", "stderr_bytes", "truncated"),
        **pick(run, "exit_code", "session_id", "run_id", "duration_ms", "reason", "terminal", "emulated"),
        status=run.status.value,
        denied=show_denials(run.denied),
        denied_more=run.denied.more,
    )


def show_terminal(terminal: LiveTerminal) -> pb.TerminalOpened:
    return pb.TerminalOpened(**pick(terminal, "run_id", "session_id", "started", "resumed", "others"))


def show_process(command: CommandInfo) -> pb.ProcessInfo:
    text, content = show_text(command.name)
    return pb.ProcessInfo(
        command=text,
        command_bytes=content,
        **pick(command, "pid", "running", "exit_code", "signal", "started", "stdout_bytes", "stderr_bytes"),
    )


def show_file(entry: Entry) -> pb.FileInfo:
    text, content = show_text(entry.name)
    return pb.FileInfo(
        path=text,
        path_bytes=content,
        modified=entry.mtime_ns / 1e9,
        type=entry.type.name.lower(),
        size=entry.size,
        permissions=entry.mode & 0o7777,
        unreadable=entry.unreadable,
    )


def show_status(status: ServiceStatus, caller: Caller) -> pb.StatusResponse:
    return pb.StatusResponse(
        **pick(status, "available", "version", "sessions", "warm"),
        runtime_class=status.runtime.value if status.runtime else "",
        runtimes=[
            pb.RuntimeInfo(
                runtime_class=report.runtime.value,
                **pick(report, "available", "version", "reason", "hint", "notes", "emulated"),
            )
            for report in status.runtimes
        ],
        tenant_id=caller.tenant,
        scope=find_scope(caller).value,
        name=caller.name or caller.label,
    )


def show_image(image: NamedImage) -> pb.Image:
    return pb.Image(
        image=image.name,
        tenant_id=image.tenant,
        **pick(image, "digest", "size", "owner", "added", "last_used"),
    )


def show_approval(approval: Approval) -> pb.Approval:
    return pb.Approval(
        **pick(approval, "approval_id", "session_id", "action", "reason"),
        tenant_id=approval.tenant,
        status=approval.status.value,
        asked_by=approval.asker,
        asked_at=approval.asked,
        expires_at=approval.expires,
        answered_by=approval.answerer,
        answered_at=approval.answered or 0,
    )


def show_key(record: KeyRecord) -> pb.ApiKey:
    return pb.ApiKey(
        **pick(record, "name", "key_id", "scope", "created", "last_used"),
        tenant_ids=record.tenants,
        expires_at=record.expires or 0,
    )


def show_certificate(issued: Certificate) -> pb.LoginResponse:
    caller = issued.caller
    return pb.LoginResponse(
        certificate=issued.certificate,
        ca_certificate=issued.authority,
        expires_at=issued.expires,
        tenant_id=caller.tenant,
        scope=find_scope(caller).value,
        name=caller.name or caller.label,
    )
