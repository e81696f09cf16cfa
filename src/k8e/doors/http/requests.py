"""Turns the JSON of requests into core's specs.

Only types are checked here: that a number is a number and that no key is unknown. Whether a value is allowed is for
core to decide.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from k8e.core.model import (
    REMOTE,
    ChildSpec,
    HostsChange,
    Language,
    ManifestEntry,
    ManifestFile,
    RunSpec,
    SessionSpec,
    Terminal,
    TerminalSpec,
)
from k8e.doors import requests
from k8e.doors.errors import invalid
from k8e.doors.http.fields import Fields
from k8e.doors.requests import read_manifest
from k8e.engine import Limits, Mount, Runtime, Shape
from k8e.engine.images import Credentials

_COUNTS = ("memory", "pids", "disk", "inodes", "open_files")  # limits that are whole numbers


async def read_new_session(fields: Fields, limits: Limits) -> SessionSpec:
    """In a thread where there is much to read: a manifest and files have any length."""
    if "manifest" in fields or "files" in fields:
        return await asyncio.to_thread(read_session_spec, fields, limits)
    return read_session_spec(fields, limits)


def read_run_spec(session_id: str, fields: Fields) -> RunSpec:
    argv = fields.take_texts("argv")
    defaults = RunSpec(session_id)
    spec = RunSpec(
        session_id=session_id,
        code=fields.take_text("code"),
        language=fields.take_choice("language", Language) or defaults.language,
        argv=tuple(word.encode("utf-8", "surrogateescape") for word in argv or ()),
        timeout=fields.take_number("timeout", defaults.timeout),
        env=fields.take_mapping("env"),
        workdir=fields.take_text("workdir"),
        stdin=fields.take_bytes("stdin"),
        background=fields.take_flag("background"),
        terminal=_read_terminal(fields.take_fields("terminal")) if "terminal" in fields else None,
        entrypoint=fields.take_flag("entrypoint"),
        user=fields.take_text("user"),
    )
    fields.finish()
    if argv == [] and not spec.code and not spec.entrypoint:
        raise invalid("argv", "is an empty list", "The program is its first entry.")  # else: an empty program, for bash
    return spec


def _read_terminal(fields: Fields) -> Terminal:
    defaults = Terminal()
    terminal = Terminal(
        rows=fields.take_count("rows", defaults.rows),
        columns=fields.take_count("columns", defaults.columns),
        term=fields.take_text("term", defaults.term),
    )
    fields.finish()
    return terminal


def read_terminal_spec(session_id: str, fields: Fields) -> TerminalSpec:
    spec = TerminalSpec(
        session_id=session_id,
        terminal=_read_terminal(fields.take_fields("terminal")),
        command=fields.take_text("command"),
        user=fields.take_text("user"),
        run_id=fields.take_text("run_id"),
        new=fields.take_flag("new"),
    )
    fields.finish()
    return spec


def read_signal(fields: Fields) -> int:
    number = fields.take_count("signal", 0)
    fields.finish()
    return number


def read_size(fields: Fields) -> tuple[int, int]:
    size = fields.take_count("rows", 0), fields.take_count("columns", 0)
    fields.finish()
    return size


def read_hosts_change(fields: Fields) -> HostsChange:
    change = HostsChange(
        hosts=fields.take_texts("hosts"),
        add=fields.take_texts("add") or (),
        remove=fields.take_texts("remove") or (),
    )
    change = requests.read_hosts_change(change, clear=fields.take_flag("clear"))
    fields.finish()
    return change


def read_start(fields: Fields) -> tuple[dict[str, str], dict[str, str]]:
    """Reads the variables and secrets that a session is started with, besides those it had."""
    given = fields.take_mapping("env"), fields.take_mapping("secrets")
    fields.finish()
    return given


def read_credentials(fields: Fields) -> Credentials:
    credentials = Credentials(
        username=fields.take_text("username"),
        password=fields.take_text("password"),
        identity_token=fields.take_text("identity_token"),
    )
    fields.finish()
    return credentials


def read_session_spec(fields: Fields, limits: Limits) -> SessionSpec:
    """`limits` apply where the request has none."""
    defaults = SessionSpec()
    spec = SessionSpec(
        session_id=fields.take_text("session_id"),
        tenant=fields.take_text("tenant_id"),
        runtime=fields.take_choice("runtime", Runtime),
        image=fields.take_text("image", defaults.image),
        env=fields.take_mapping("env"),
        limits=replace(limits, **_read_limits(fields.take_fields("limits"))) if "limits" in fields else None,
        ttl=fields.take_number("ttl", 0) if "ttl" in fields else None,
        allowed_hosts=fields.take_texts("allowed_hosts"),
        more_hosts=fields.take_texts("more_hosts") or (),
        shape=_read_shape(fields),
        secrets=fields.take_mapping("secrets"),
        persistent=fields.take_flag("persistent"),
        labels=fields.take_mapping("labels"),
        manifest=_read_manifest(fields),
        workdir=fields.take_text("workdir"),
    )
    fields.finish()
    return spec


def read_child_spec(fields: Fields) -> ChildSpec:
    spec = ChildSpec(
        session_id=fields.take_text("session_id"),
        runtime=fields.take_choice("runtime", Runtime),
        image=fields.take_text("image"),
        env=fields.take_mapping("env"),
        limits=_read_limits(fields.take_fields("limits")),
        ttl=fields.take_number("ttl", 0) if "ttl" in fields else None,
        allowed_hosts=fields.take_texts("allowed_hosts"),
        read_only=fields.take_flag("read_only") if "read_only" in fields else None,
        powerless=fields.take_flag("powerless") if "powerless" in fields else None,
        agent_type=fields.take_text("agent_type"),
        workspace_path=fields.take_text("workspace_path"),
    )
    fields.finish()
    return spec


def _read_shape(fields: Fields) -> Shape:
    return Shape(
        mounts=tuple(map(_read_mount, fields.take_each("mounts"))),
        read_only=fields.take_flag("read_only"),
        powerless=fields.take_flag("powerless"),
    )


def _read_mount(fields: Fields) -> Mount:
    """Core sets the owner: the caller."""
    mount = Mount(
        source=fields.take_text("source"),
        target=fields.take_text("target"),
        owner=REMOTE,
        writable=fields.take_flag("writable"),
        kept=tuple(fields.take_texts("kept") or ()),
        hidden=tuple(fields.take_texts("hidden") or ()),
        private=tuple(fields.take_texts("private") or ()),
    )
    fields.finish()
    return mount


def _read_limits(fields: Fields) -> dict[str, Any]:
    """Reads those limits that are given."""
    limits: dict[str, Any] = {name: fields.take_count(name, 0) for name in _COUNTS if name in fields}
    if "cpus" in fields:
        limits["cpus"] = fields.take_number("cpus", 0)
    fields.finish()
    return limits


def _read_manifest(fields: Fields) -> tuple[ManifestEntry, ...]:
    text, repo, ref = (fields.take_text(name) for name in ("manifest", "git_repo", "git_ref"))
    return (*read_manifest(text, repo, ref), *map(_read_file, fields.take_each("files")))


def _read_file(fields: Fields) -> ManifestFile:
    """A file of any bytes, which YAML cannot carry."""
    file = ManifestFile(fields.take_text("path"), fields.take_bytes("content"), fields.take_count("mode", 0o644))
    fields.finish()
    return file
