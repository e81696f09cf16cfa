"""Turns core's answers into JSON (docs/http-api.md). The command line prints these objects as they are."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from k8e.core.model import Approval, Denials, NamedImage, RunResult, ServiceStatus, Session
from k8e.engine import Mount, RuntimeReport
from k8e.link.model import CommandInfo, Entry

if TYPE_CHECKING:
    from k8e.core.contract import LiveTerminal
    from k8e.identity.register import KeyRecord

Json = dict[str, Any]


def pick(value: object, *names: str) -> dict[str, Any]:
    """Returns the attributes that are called the same in core and in the answer."""
    return {name: getattr(value, name) for name in names}


def text_of(name: str, data: bytes) -> Json:
    """The bytes as text; where they are not UTF-8, readable text and the exact bytes beside it."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: data.decode(errors="replace"), f"{name}_base64": base64.b64encode(data).decode("ascii")}


def show_policy(session: Session) -> Json:
    """Mounts and flags of a sandbox's shape are left out where it has none."""
    shape = session.shape
    policy: Json = {"allowed_hosts": list(session.hosts.texts)}
    if shape.mounts:
        policy["mounts"] = [show_mount(mount) for mount in shape.mounts]
    policy |= {name: True for name in ("read_only", "powerless") if getattr(shape, name)}
    return policy


def show_mount(mount: Mount) -> Json:
    lists = {name: list(getattr(mount, name)) for name in ("kept", "hidden", "private")}
    return {**pick(mount, "source", "target", "writable"), **lists}


def show_hosts(session: Session) -> Json:
    return {"session_id": session.session_id, "policy": show_policy(session)}


def show_denials(denials: Denials) -> Json:
    """`denied_more` is left out where there are no more."""
    denied = [pick(denial, "host", "address", "port", "reason", "hint") for denial in denials.entries]
    return {"denied": denied, "denied_more": denials.more} if denials.more else {"denied": denied}


def show_emulated(shown: Session | RunResult | RuntimeReport) -> Json:
    """Left out where it is not: then times mean what they usually mean."""
    return {"emulated": True} if shown.emulated else {}


def show_created(session: Session) -> Json:
    return {
        "session_id": session.session_id,
        "runtime": session.runtime.value,
        **show_emulated(session),
        "policy": {
            "image": session.image,
            "limits": asdict(session.limits),
            "ttl": session.ttl,
            **show_policy(session),
        },
    }


def show_child(session: Session) -> Json:
    return {**show_created(session), "parent_session_id": session.parent}


def show_session(session: Session) -> Json:
    return {
        "session_id": session.session_id,
        "tenant_id": session.tenant,
        "phase": session.phase.value,
        "runtime": session.runtime.value,
        **show_emulated(session),
        "image": session.image,
        "limits": asdict(session.limits),
        "env_keys": list(session.env_keys),
        **pick(session, "owner", "created", "last_used", "ttl"),
        "policy": show_policy(session),
        "parent_session_id": session.parent or None,
        "children": list(session.children),
        "persistent": session.persistent,
        "labels": dict(session.labels),
        **({"secret_keys": list(session.secret_keys)} if session.secret_keys else {}),
        **({"load": asdict(session.load)} if session.load else {}),
    }


def show_session_with_denials(session: Session) -> Json:
    """With the latest denials."""
    return {**show_session(session), **show_denials(session.denied)}


def show_run(run: RunResult) -> Json:
    return {
        **text_of("stdout", run.stdout),
        **text_of("stderr", run.stderr),
        **show_run_summary(run),
    }


def show_run_summary(run: RunResult) -> Json:
    """Without the output."""
    return {
        **pick(run, "exit_code", "session_id", "run_id"),
        "status": run.status.value,
        **pick(run, "duration_ms", "truncated", "stdout_bytes", "stderr_bytes"),
        **({"reason": run.reason} if run.reason else {}),
        **({"terminal": True} if run.terminal else {}),
        **show_emulated(run),
        **show_denials(run.denied),
    }


def show_terminal(terminal: LiveTerminal) -> Json:
    """As a client finds it that has come to it."""
    return {**pick(terminal, "run_id", "session_id", "started", "resumed"), "others": list(terminal.others)}


def show_command(command: CommandInfo) -> Json:
    return {
        "pid": command.pid,
        **text_of("command", command.name),
        **pick(command, "running", "exit_code", "signal", "started", "stdout_bytes", "stderr_bytes"),
    }


def show_entry(entry: Entry) -> Json:
    return {
        **text_of("path", entry.name),
        "modified": entry.mtime_ns / 1e9,
        "type": entry.type.name.lower(),
        "size": entry.size,
        **({"unreadable": True} if entry.unreadable else {}),
    }


def show_file(path: str, content: bytes) -> Json:
    try:
        return {"content": content.decode(), "path": path, "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"content": base64.b64encode(content).decode("ascii"), "path": path, "encoding": "base64"}


def show_status(status: ServiceStatus) -> Json:
    return {
        "available": status.available,
        "runtime": status.runtime.value if status.runtime else None,
        **pick(status, "version", "sessions", "warm"),
        "runtimes": [
            {
                "runtime": report.runtime.value,
                **pick(report, "available", "version", "reason", "hint"),
                "notes": list(report.notes),
                **show_emulated(report),
            }
            for report in status.runtimes
        ],
    }


def show_caller(name: str, tenant_id: str, scope: str) -> Json:
    """Who is calling, as the daemon sees it."""
    return {"caller": {"name": name, "tenant_id": tenant_id or None, "scope": scope}}


def exit_header(exit_code: int | None) -> Mapping[str, str]:
    """The exit code, for clients that do not parse the JSON. There is no header for an unknown one."""
    return {} if exit_code is None else {"K8E-Exit-Code": str(exit_code)}


def show_approval(approval: Approval) -> Json:
    return {
        **pick(approval, "approved", "approval_id"),
        "status": approval.status.value,
        "session_id": approval.session_id,
        "tenant_id": approval.tenant,
        "action": approval.action,
        "asked_by": approval.asker,
        "asked_at": approval.asked,
        "expires_at": approval.expires,
        "answered_by": approval.answerer,
        "answered_at": approval.answered,
        "reason": approval.reason,
    }


def show_image(image: NamedImage) -> Json:
    return {
        "image": image.name,
        **pick(image, "digest", "size", "owner"),
        "tenant_id": image.tenant,
        **pick(image, "added", "last_used"),
    }


def show_key(record: KeyRecord) -> Json:
    return {
        **pick(record, "name", "key_id", "scope"),
        "tenant_ids": list(record.tenants),
        "created": record.created,
        "expires_at": record.expires,
        "last_used": record.last_used or None,
    }


def show_new_key(shape: Json, text: str, endpoint: str) -> Json:
    return {"name": shape["name"], "key": text, **shape, "endpoint": endpoint or None}
