"""From the arguments of a client's methods to gRPC messages, and from messages to the data of core.

The JSON of that data is made by the functions that the HTTP door uses, so that a command prints the same everywhere.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from k8e.cli.process import Failure
from k8e.core.model import (
    Approval,
    ApprovalStatus,
    Denial,
    Denials,
    Load,
    NamedImage,
    Phase,
    RunResult,
    ServiceStatus,
    Session,
    Status,
)
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.http.answers import Json
from k8e.engine import Limits, Runtime, RuntimeReport, Shape
from k8e.link.model import CommandInfo
from k8e.policy import HostList

if TYPE_CHECKING:
    from k8e.cli.client.service import Wanted


def decode(text: str) -> str:
    """The text that the user typed, in UTF-8; a byte that is none becomes a lone surrogate."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def readable(text: str) -> str:
    """For names and the like, which are text and nothing else: the service refuses what is no name."""
    return os.fsencode(text).decode("utf-8", "replace")


def split_text(name: str, text: str) -> dict[str, Any]:
    """The field for text if it is valid UTF-8, else the field for bytes."""
    content = os.fsencode(text)
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_bytes": content}


def name_part(path: str, offset: int, length: int | None) -> dict[str, Any]:
    return {**split_text("path", path), "offset": offset, "length": length or 0}


def split_env(env: Mapping[str, str], field: str = "env") -> dict[str, Any]:
    texts: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    for name, value in env.items():
        fields = split_text("env", value)
        texts.update({name: fields["env"]} if "env" in fields else {})
        contents.update({name: fields["env_bytes"]} if "env_bytes" in fields else {})
    return {field: texts, f"{field}_bytes": contents}


SANDBOX: Final = ("session_id", "image", "ttl", "read_only", "powerless")
SESSION: Final = (*SANDBOX, "tenant_id", "manifest", "git_repo", "git_ref", "persistent", "labels", "more_hosts")
CHILD: Final = (*SANDBOX, "agent_type", "workspace_path")


def write_session(wanted: Wanted) -> pb.CreateSessionRequest:
    fields = write_sandbox(wanted, SESSION, "secrets")
    return pb.CreateSessionRequest(**fields, **split_env(wanted.get("secrets") or {}, "secrets"))


def write_child(parent: str, wanted: Wanted) -> pb.RunSubAgentRequest:
    return pb.RunSubAgentRequest(parent_session_id=readable(parent), **write_sandbox(wanted, CHILD))


def write_sandbox(wanted: Wanted, names: tuple[str, ...], *others: str) -> dict[str, Any]:
    hosts = wanted.get("allowed_hosts")
    known = {*names, *others, "env", "runtime", "limits", "allowed_hosts"}
    if unknown := sorted(name for name, value in wanted.items() if value and name not in known):
        hint = "use it on the gateway's machine"
        raise Failure("not_remote", f"{unknown[0]} cannot be asked for over a gateway", hint=hint)
    values = {name: wanted[name] for name in names if wanted.get(name) is not None}
    return {
        **{name: readable(value) if isinstance(value, str) else value for name, value in values.items()},
        **split_env(wanted.get("env") or {}),
        "runtime_class": readable(wanted.get("runtime") or ""),
        "limits": pb.Limits(**wanted["limits"]) if wanted.get("limits") else None,
        "allowed_hosts": [readable(host) for host in hosts or ()],
        "deny_all_hosts": hosts is not None and not hosts,
    }


def write_start(session_id: str, wanted: Wanted) -> pb.StartSessionRequest:
    env, secrets = split_env(wanted.get("env", {})), split_env(wanted.get("secrets", {}), "secrets")
    return pb.StartSessionRequest(session_id=readable(session_id), **env, **secrets)


def write_run(session_id: str, wanted: Wanted, stdin: bytes = b"") -> pb.ExecRequest:
    return pb.ExecRequest(
        session_id=readable(session_id),
        **split_text("command", wanted["code"]),
        language=wanted["language"],
        timeout=wanted["timeout"],
        **split_text("workdir", wanted.get("workdir", "")),
        **split_env(wanted.get("env", {})),
        stdin=stdin,
        background=wanted.get("background", False),
        user=readable(wanted.get("user", "")),
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
        load=read_load(session.load) if session.HasField("load") else None,
        emulated=session.emulated,
    )


def read_load(load: pb.Load) -> Load:
    return Load(load.cpu_seconds, load.memory, load.commands, load.denied)


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
        terminal=run.terminal,
        emulated=run.emulated,
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
    shown = {"path": file.path, **exact, "modified": file.modified, "type": file.type, "size": file.size}
    return {**shown, "unreadable": True} if file.unreadable else shown


def read_status(status: pb.StatusResponse) -> ServiceStatus:
    return ServiceStatus(
        available=status.available,
        version=status.version,
        runtime=Runtime(status.runtime_class) if status.runtime_class else None,
        runtimes=[
            RuntimeReport(
                *(Runtime(one.runtime_class), one.available, one.version, one.reason, one.hint),
                notes=tuple(one.notes),
                emulated=one.emulated,
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
