"""The tables of each kind of answer (docs/http-api.md has their JSON), and the plain form of all others."""

from __future__ import annotations

from k8e.cli.view.table import draw_table, show_age, show_size, show_span, show_until, uses_colour
from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    # The head of a column, and what a cell of it shows of an entry.
    Column: TypeAlias = tuple[str, Callable[[Mapping[str, Any]], str]]


def take(*names: str) -> Callable[[Mapping[str, Any]], str]:
    """Shows a member; "limits.memory" is a member of a member."""

    def show(entry: Mapping[str, Any]) -> str:
        value: Any = entry
        for name in names:
            value = value.get(name) if hasattr(value, "get") else None
        return show_plain(value)

    return show


def show_plain(value: object) -> str:
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(show_plain(each) for each in value)
    return str(value)


SESSIONS: Sequence[Column] = (
    ("SESSION", take("session_id")),
    ("PHASE", take("phase")),
    ("RUNTIME", take("runtime")),
    ("IMAGE", take("image")),
    ("CPUS", take("limits", "cpus")),
    ("MEMORY", lambda entry: show_size(entry["limits"]["memory"])),
    ("TENANT", take("tenant_id")),
    ("CREATED", lambda entry: show_age(entry["created"])),
    ("LAST USED", lambda entry: show_age(entry["last_used"])),
)
FILES: Sequence[Column] = (
    ("TYPE", take("type")),
    ("SIZE", lambda entry: show_size(entry["size"]) if entry["type"] == "file" else "-"),
    ("MODIFIED", lambda entry: show_age(entry["modified"])),
    ("PATH", take("path")),
)
RUNS: Sequence[Column] = (
    ("RUN", take("run_id")),
    ("STATUS", take("status")),
    ("EXIT", take("exit_code")),
    ("TOOK", lambda entry: show_span((entry["duration_ms"] or 0) / 1000)),
    ("STDOUT", lambda entry: show_size(entry["stdout_bytes"])),
    ("STDERR", lambda entry: show_size(entry["stderr_bytes"])),
)
PROCESSES: Sequence[Column] = (
    ("PID", take("pid")),
    ("RUNNING", take("running")),
    ("STARTED", lambda entry: show_age(entry["started"])),
    ("STDOUT", lambda entry: show_size(entry["stdout_bytes"])),
    ("STDERR", lambda entry: show_size(entry["stderr_bytes"])),
    ("COMMAND", take("command")),
)
APPROVALS: Sequence[Column] = (
    ("APPROVAL", take("approval_id")),
    ("STATUS", take("status")),
    ("SESSION", take("session_id")),
    ("ASKED BY", take("asked_by")),
    ("ASKED", lambda entry: show_age(entry["asked_at"])),
    ("EXPIRES", lambda entry: show_until(entry["expires_at"])),
    ("ACTION", take("action")),
)
IMAGES: Sequence[Column] = (
    ("IMAGE", take("image")),
    ("DIGEST", lambda entry: str(entry["digest"]).removeprefix("sha256:")[:12]),
    ("SIZE", lambda entry: show_size(entry["size"])),
    ("ADDED", lambda entry: show_age(entry["added"])),
    ("LAST USED", lambda entry: show_age(entry["last_used"])),
)
KEYS: Sequence[Column] = (
    ("NAME", take("name")),
    ("SCOPE", take("scope")),
    ("TENANTS", take("tenant_ids")),
    ("CREATED", lambda entry: show_age(entry["created"])),
    ("EXPIRES", lambda entry: show_until(entry["expires_at"])),
    ("LAST USED", lambda entry: show_age(entry["last_used"])),
)
RUNTIMES: Sequence[Column] = (
    ("RUNTIME", take("runtime")),
    ("WORKS", take("available")),
    ("VERSION", take("version")),
    ("REASON", take("reason")),
)
NODES: Sequence[Column] = (
    ("NODE", take("node")),
    ("ROLE", take("role")),
    ("READY", take("ready")),
    ("SCHEDULABLE", take("schedulable")),
    ("ADDRESS", take("address")),
    ("VERSION", take("version")),
    ("RUNTIMES", take("runtimes")),
)
PROGRAMS: Sequence[Column] = (
    ("PROGRAM", take("program")),
    ("PID", take("pid")),
)
TOKENS: Sequence[Column] = (
    ("ID", take("id")),
    ("DESCRIPTION", take("description")),
    ("CREATED", take("created")),
    ("EXPIRES", lambda entry: str(entry.get("expires") or "never")),
    ("OVER", take("over")),
)
# The member of the answer that is a list, and its columns.
TABLES: Mapping[str, Sequence[Column]] = {
    "sessions": SESSIONS,
    "files": FILES,
    "runs": RUNS,
    "processes": PROCESSES,
    "approvals": APPROVALS,
    "images": IMAGES,
    "keys": KEYS,
    "runtimes": RUNTIMES,
    "programs": PROGRAMS,
    "nodes": NODES,
    "tokens": TOKENS,
}
COLOURS = {
    **dict.fromkeys(("active", "completed", "approved", "running"), "green"),
    **dict.fromkeys(("creating", "stopped", "pending", "starting", "stopping"), "yellow"),
    **dict.fromkeys(("failed", "killed", "timed_out", "oom_killed", "lost", "rejected", "expired"), "red"),
    **dict.fromkeys(("destroyed", "-", "never"), "grey"),
}
MOMENTS = ("created", "last_used", "added", "asked_at", "answered_at", "started")
SIZES = ("memory", "disk", "size", "bytes", "stdout_bytes", "stderr_bytes")
SPANS = ("ttl",)
TEXTS = ("stdout", "stderr", "content")  # of many lines: they come last, each below its name


def draw(value: Mapping[str, Any], noun: str = "") -> str:
    """Draws a table if the answer is a list, else a line for each member."""
    if noun in TABLES and isinstance(value.get(noun), list):
        return draw_list(value[noun], noun)
    tables = [name for name in TABLES if isinstance(value.get(name), list)]
    text = draw_record({name: each for name, each in value.items() if name not in tables})
    return text + "".join(f"\n{draw_list(value[name], name)}" for name in tables)


def draw_list(entries: Sequence[Mapping[str, Any]], noun: str) -> str:
    if not entries:
        return f"no {noun}\n"
    columns = TABLES[noun]
    rows = [[show(entry) for _, show in columns] for entry in entries]
    return draw_table([head for head, _ in columns], rows, COLOURS, uses_colour())


def draw_record(record: Mapping[str, Any]) -> str:
    rows = list_members({name: value for name, value in record.items() if name not in TEXTS})
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{clean(name).ljust(width)}  {clean(text)}\n" for name, text in rows]
    for name in TEXTS:
        if text := record.get(name):
            lines += [f"\n{name}:\n", *(f"{clean_line(line)}\n" for line in str(text).removesuffix("\n").split("\n"))]
    return "".join(lines)


def clean_line(line: str) -> str:
    return "\t".join(clean(part) for part in line.split("\t"))


def list_members(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Leaves out what is empty: a person looks for what is there."""
    members: list[tuple[str, str]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            members += list_members(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, each in enumerate(value):
                members += list_members(each, f"{prefix}{name}.{number}.")
        elif value is not None and value != "" and value != []:
            members.append((prefix + name, show_member(name, value)))
    return members


def show_member(name: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in MOMENTS:
            return show_age(value)
        if name == "expires_at":
            return show_until(value)
        if name in SIZES:
            return show_size(value)
        if name in SPANS:
            return show_span(value)
    return show_plain(value)
