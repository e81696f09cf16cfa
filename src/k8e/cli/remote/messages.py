"""From the requests of the local door to messages, and from messages to the JSON that the local door answers with.

The way back goes through the service's own data, so that both doors' answers are made by the same functions.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from k8e.core.errors import Fault, Kind
from k8e.core.model import (
    Approval,
    ApprovalStatus,
    ChildSpec,
    Denial,
    Denials,
    NamedImage,
    Phase,
    RunResult,
    RunSpec,
    ServiceStatus,
    Session,
    Status,
)
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.http.answers import Json
from k8e.engine import Limits, Runtime, RuntimeReport, Shape
from k8e.link.model import CommandInfo
from k8e.policy import HostList


def split_text(name: str, text: str) -> dict[str, Any]:
    """As text where it is, else as the bytes that were meant."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return {f"{name}_bytes": text.encode("utf-8", "surrogateescape")}
    return {name: text}


def split_env(env: Mapping[str, str], field: str = "env") -> dict[str, Any]:
    texts: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    for name, value in env.items():
        fields = split_text("env", value)
        texts.update({name: fields["env"]} if "env" in fields else {})
        contents.update({name: fields["env_bytes"]} if "env_bytes" in fields else {})
    return {field: texts, f"{field}_bytes": contents}


def write_session(wanted: Json) -> pb.CreateSessionRequest:
    hosts = wanted.get("allowed_hosts")
    names = [
        *("session_id", "tenant_id", "image", "ttl", "manifest", "git_repo", "git_ref"),
        *("persistent", "labels", "more_hosts", "read_only", "powerless"),
    ]
    known = {*names, "env", "secrets", "runtime", "limits", "allowed_hosts"}
    if unknown := sorted(name for name, value in wanted.items() if value and name not in known):
        hint = "use it on the gateway's machine"
        raise Fault(Kind.NOT_YET, "not_remote", f"{unknown[0]} cannot be asked for over a gateway", hint=hint)
    return pb.CreateSessionRequest(
        **{name: wanted[name] for name in names if wanted.get(name) is not None},
        **split_env(wanted.get("env") or {}),
        **split_env(wanted.get("secrets") or {}, "secrets"),
        runtime_class=wanted.get("runtime") or "",
        limits=pb.Limits(**wanted["limits"]) if wanted.get("limits") else None,
        allowed_hosts=hosts or (),
        deny_all_hosts=hosts is not None and not hosts,
    )


def write_start(session_id: str, env: Mapping[str, str], secrets: Mapping[str, str]) -> pb.StartSessionRequest:
    return pb.StartSessionRequest(session_id=session_id, **split_env(env), **split_env(secrets, "secrets"))


def write_child(parent: str, spec: ChildSpec) -> pb.RunSubAgentRequest:
    return pb.RunSubAgentRequest(
        parent_session_id=parent,
        session_id=spec.session_id,
        runtime_class=spec.runtime.value if spec.runtime else "",
        image=spec.image,
        **split_env(spec.env),
        limits=pb.Limits(**spec.limits),  # type: ignore[arg-type]
        ttl=spec.ttl or 0,
        allowed_hosts=spec.allowed_hosts or (),
        deny_all_hosts=spec.allowed_hosts is not None and not spec.allowed_hosts,
        read_only=bool(spec.read_only),
        powerless=bool(spec.powerless),
        agent_type=spec.agent_type,
        workspace_path=spec.workspace_path,
    )


def write_run(spec: RunSpec) -> pb.ExecRequest:
    return pb.ExecRequest(
        session_id=spec.session_id,
        **split_text("command", spec.code),
        language=spec.language.value,
        argv=spec.argv,
        timeout=spec.timeout,
        **split_text("workdir", spec.workdir),
        **split_env(spec.env),
        stdin=spec.stdin,
        background=spec.background,
    )


def read_denials(entries: Any, more: int) -> Denials:
    return Denials(
        tuple(Denial(one.host, one.address, one.port, one.reason, one.hint, one.at) for one in entries), more
    )


def read_session(session: pb.Session) -> Session:
    limits = session.limits
    return Session(
        session_id=session.session_id,
        tenant=session.tenant_id,
        owner=session.owner,
        phase=Phase(session.phase),
        runtime=Runtime(session.runtime_class),
        image=session.image,
        limits=Limits(limits.cpus, limits.memory, limits.pids, limits.disk, limits.inodes, limits.open_files),
        env_keys=tuple(session.env_keys),
        created=session.created,
        last_used=session.last_used,
        ttl=session.ttl,
        hosts=HostList.parse(session.allowed_hosts),
        denied=read_denials(session.denied, session.denied_more),
        parent=session.parent_session_id,
        children=tuple(session.children),
        shape=Shape(read_only=session.read_only, powerless=session.powerless),
        labels=dict(session.labels),
        persistent=session.persistent,
        secret_keys=tuple(session.secret_keys),
    )


def read_run(run: pb.ExecResponse) -> RunResult:
    return RunResult(
        run_id=run.run_id,
        session_id=run.session_id,
        status=Status(run.status),
        exit_code=run.exit_code if run.HasField("exit_code") else None,
        stdout=run.stdout,
        stderr=run.stderr,
        stdout_bytes=run.stdout_bytes,
        stderr_bytes=run.stderr_bytes,
        truncated=run.truncated,
        duration_ms=run.duration_ms,
        denied=read_denials(run.denied, run.denied_more),
        reason=run.reason,
    )


def read_process(process: pb.ProcessInfo) -> CommandInfo:
    return CommandInfo(
        id=0,
        pid=process.pid,
        running=process.running,
        attached=False,
        exit_code=process.exit_code if process.HasField("exit_code") else None,
        signal=process.signal if process.HasField("signal") else None,
        cause=None,
        started=process.started,
        stdout_bytes=process.stdout_bytes,
        stderr_bytes=process.stderr_bytes,
        name=process.command_bytes or process.command.encode(),
    )


def show_file(file: pb.FileInfo) -> Json:
    exact = {"path_base64": base64.b64encode(file.path_bytes).decode("ascii")} if file.path_bytes else {}
    return {"path": file.path, **exact, "modified": file.modified, "type": file.type, "size": file.size}


def read_status(status: pb.StatusResponse) -> ServiceStatus:
    return ServiceStatus(
        available=status.available,
        version=status.version,
        runtime=Runtime(status.runtime_class) if status.runtime_class else None,
        runtimes=[
            RuntimeReport(
                Runtime(one.runtime_class), one.available, one.version, one.reason, one.hint, tuple(one.notes)
            )
            for one in status.runtimes
        ],
        sessions=status.sessions,
        warm=status.warm,
    )


def read_approval(approval: pb.Approval) -> Approval:
    return Approval(
        approval_id=approval.approval_id,
        session_id=approval.session_id,
        tenant=approval.tenant_id,
        action=approval.action,
        status=ApprovalStatus(approval.status),
        asker=approval.asked_by,
        asked=approval.asked_at,
        expires=approval.expires_at,
        answerer=approval.answered_by,
        answered=approval.answered_at or None,
        reason=approval.reason,
    )


def read_image(image: pb.Image) -> NamedImage:
    return NamedImage(
        name=image.image,
        digest=image.digest,
        size=image.size,
        owner=image.owner,
        tenant=image.tenant_id,
        added=image.added,
        last_used=image.last_used,
    )


def show_key(key: pb.ApiKey) -> Json:
    return {
        "name": key.name,
        "key_id": key.key_id,
        "scope": key.scope,
        "tenant_ids": list(key.tenant_ids),
        "created": key.created,
        "expires_at": key.expires_at or None,
        "last_used": key.last_used or None,
    }
