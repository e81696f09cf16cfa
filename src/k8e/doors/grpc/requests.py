"""Turns messages into core's specs.

Only types are checked here; whether a value is allowed is for core to decide. 0 and empty mean that the caller gave no
value.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from k8e.core.access.keys import DEFAULT_TTL, KeySpec
from k8e.core.model import (
    DEFAULT_TIMEOUT,
    ChildSpec,
    HostsChange,
    Language,
    RunSpec,
    Scope,
    SessionSpec,
    Terminal,
    TerminalSpec,
)
from k8e.doors import requests
from k8e.doors.errors import invalid
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.requests import read_manifest
from k8e.engine import Limits, Runtime, Shape

Choice = TypeVar("Choice", bound=enum.Enum)


class HasPath(Protocol):
    path: str
    path_bytes: bytes


def read_text(field: str, text: str, content: bytes) -> str:
    """Reads one of the two. Bytes that are not UTF-8 become lone surrogates, as in Python's own paths."""
    if text and content:
        raise invalid(field, f"both {field} and {field}_bytes are given")
    return text or content.decode("utf-8", "surrogateescape")


def read_path(message: HasPath) -> str:
    return read_text("path", message.path, message.path_bytes)


def read_choice(field: str, text: str, kinds: type[Choice]) -> Choice | None:
    if not text:
        return None
    try:
        return kinds(text)
    except ValueError:
        known = ", ".join(str(member.value) for member in kinds)
        raise invalid(field, f"{text[:64]!r} is no {field}", hint=f"one of: {known}") from None


def read_env(text: Mapping[str, str], content: Mapping[str, bytes], field: str = "env") -> dict[str, str]:
    env = dict(text)
    for name, value in content.items():
        env[name] = read_text(f"{field}.{name[:64]}", env.get(name, ""), value)
    return env


def read_session_spec(request: pb.CreateSessionRequest, defaults: Limits) -> SessionSpec:
    """Takes long for a large manifest."""
    return SessionSpec(
        session_id=request.session_id,
        tenant=request.tenant_id,
        runtime=read_choice("runtime_class", request.runtime_class, Runtime),
        image=request.image or SessionSpec().image,
        env=read_env(request.env, request.env_bytes),
        limits=replace(defaults, **list_limits(request.limits)) if request.HasField("limits") else None,
        ttl=request.ttl or None,
        allowed_hosts=read_hosts(request),
        more_hosts=tuple(request.more_hosts),
        shape=Shape(read_only=request.read_only, powerless=request.powerless),
        secrets=read_env(request.secrets, request.secrets_bytes, "secrets"),
        persistent=request.persistent,
        labels=dict(request.labels),
        manifest=read_manifest(request.manifest, request.git_repo, request.git_ref),
    )


def read_child_spec(request: pb.RunSubAgentRequest) -> ChildSpec:
    return ChildSpec(
        session_id=request.session_id,
        runtime=read_choice("runtime_class", request.runtime_class, Runtime),
        image=request.image,
        env=read_env(request.env, request.env_bytes),
        limits=list_limits(request.limits),
        ttl=request.ttl or None,
        allowed_hosts=read_hosts(request),
        read_only=request.read_only or None,
        powerless=request.powerless or None,
        agent_type=request.agent_type,
        workspace_path=request.workspace_path,
    )


def read_hosts(request: pb.CreateSessionRequest | pb.RunSubAgentRequest) -> tuple[str, ...] | None:
    if request.deny_all_hosts and request.allowed_hosts:
        raise invalid("deny_all_hosts", "deny_all_hosts is given together with allowed_hosts")
    return tuple(request.allowed_hosts) if request.deny_all_hosts or request.allowed_hosts else None


def list_limits(limits: pb.Limits) -> dict[str, Any]:
    return {field.name: value for field in fields(Limits) if (value := getattr(limits, field.name))}


def read_run_spec(request: pb.ExecRequest) -> RunSpec:
    return RunSpec(
        session_id=request.session_id,
        code=read_text("command", request.command, request.command_bytes),
        language=read_choice("language", request.language, Language) or Language.BASH,
        argv=tuple(request.argv),
        timeout=request.timeout or DEFAULT_TIMEOUT,
        env=read_env(request.env, request.env_bytes),
        workdir=read_text("workdir", request.workdir, request.workdir_bytes),
        stdin=request.stdin,
        background=request.background,
        user=request.user,
    )


def read_terminal_spec(options: pb.TerminalOptions) -> TerminalSpec:
    defaults = Terminal()
    size = options.size if options.HasField("size") else pb.TerminalSize(rows=defaults.rows, columns=defaults.columns)
    return TerminalSpec(
        session_id=options.session_id,
        terminal=Terminal(size.rows, size.columns, options.term),
        command=read_text("command", options.command, options.command_bytes),
        user=options.user,
        run_id=options.run_id,
        new=options.new,
    )


def read_hosts_change(request: pb.UpdateAllowedHostsRequest) -> HostsChange:
    hosts = tuple(request.allowed_hosts) or None
    change = HostsChange(hosts=hosts, add=tuple(request.add), remove=tuple(request.remove))
    return requests.read_hosts_change(change, clear=request.clear)


def read_key_spec(request: pb.CreateApiKeyRequest) -> KeySpec:
    return KeySpec(
        name=request.name,
        ttl=None if request.ttl < 0 else request.ttl or DEFAULT_TTL,
        scope=read_choice("scope", request.scope, Scope) or Scope.RUN,
        tenants=tuple(request.tenant_ids),
    )
