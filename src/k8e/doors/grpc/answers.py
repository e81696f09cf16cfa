"""Turns core's answers into messages."""

from __future__ import annotations

from dataclasses import asdict

from k8e.core.access.access import find_scope
from k8e.core.access.keys import Certificate
from k8e.core.model import Approval, Caller, Denials, NamedImage, RunResult, ServiceStatus, Session
from k8e.doors.grpc import sandbox_pb2 as pb
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
        )
        for denial in denials.entries
    ]


def show_session(session: Session) -> pb.Session:
    return pb.Session(
        session_id=session.session_id,
        tenant_id=session.tenant,
        phase=session.phase.value,
        runtime_class=session.runtime.value,
        image=session.image,
        limits=pb.Limits(**asdict(session.limits)),
        env_keys=session.env_keys,
        owner=session.owner,
        created=session.created,
        last_used=session.last_used,
        ttl=session.ttl,
        allowed_hosts=session.hosts.texts,
        denied=show_denials(session.denied),
        denied_more=session.denied.more,
        parent_session_id=session.parent,
        children=session.children,
        read_only=session.shape.read_only,
        powerless=session.shape.powerless,
        labels=session.labels,
        persistent=session.persistent,
        secret_keys=session.secret_keys,
    )


def show_run(run: RunResult) -> pb.ExecResponse:
    return pb.ExecResponse(
        stdout=run.stdout,
        stderr=run.stderr,
        exit_code=run.exit_code,
        session_id=run.session_id,
        run_id=run.run_id,
        status=run.status.value,
        duration_ms=run.duration_ms,
        truncated=run.truncated,
        stdout_bytes=run.stdout_bytes,
        stderr_bytes=run.stderr_bytes,
        denied=show_denials(run.denied),
        denied_more=run.denied.more,
        reason=run.reason,
    )


def show_process(command: CommandInfo) -> pb.ProcessInfo:
    text, content = show_text(command.name)
    return pb.ProcessInfo(
        pid=command.pid,
        command=text,
        command_bytes=content,
        running=command.running,
        exit_code=command.exit_code,
        signal=command.signal,
        started=command.started,
        stdout_bytes=command.stdout_bytes,
        stderr_bytes=command.stderr_bytes,
    )


def show_file(entry: Entry) -> pb.FileInfo:
    text, content = show_text(entry.name)
    return pb.FileInfo(
        path=text, path_bytes=content, modified=entry.mtime_ns / 1e9, type=entry.type.name.lower(), size=entry.size
    )


def show_status(status: ServiceStatus, caller: Caller) -> pb.StatusResponse:
    return pb.StatusResponse(
        available=status.available,
        version=status.version,
        runtime_class=status.runtime.value if status.runtime else "",
        runtimes=[
            pb.RuntimeInfo(
                runtime_class=report.runtime.value,
                available=report.available,
                version=report.version,
                reason=report.reason,
                hint=report.hint,
                notes=report.notes,
            )
            for report in status.runtimes
        ],
        sessions=status.sessions,
        warm=status.warm,
        tenant_id=caller.tenant,
        scope=find_scope(caller).value,
        name=caller.name or caller.label,
    )


def show_image(image: NamedImage) -> pb.Image:
    return pb.Image(
        image=image.name,
        digest=image.digest,
        size=image.size,
        owner=image.owner,
        tenant_id=image.tenant,
        added=image.added,
        last_used=image.last_used,
    )


def show_approval(approval: Approval) -> pb.Approval:
    return pb.Approval(
        approval_id=approval.approval_id,
        session_id=approval.session_id,
        tenant_id=approval.tenant,
        action=approval.action,
        status=approval.status.value,
        asked_by=approval.asker,
        asked_at=approval.asked,
        expires_at=approval.expires,
        answered_by=approval.answerer,
        answered_at=approval.answered or 0,
        reason=approval.reason,
    )


def show_key(record: KeyRecord) -> pb.ApiKey:
    return pb.ApiKey(
        name=record.name,
        key_id=record.key_id,
        scope=record.scope,
        tenant_ids=record.tenants,
        created=record.created,
        expires_at=record.expires or 0,
        last_used=record.last_used,
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
