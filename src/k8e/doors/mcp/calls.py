"""Which tool is which call of the service."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import (
    OUTPUT_LIMIT,
    Approval,
    ApprovalStatus,
    ChildSpec,
    Language,
    RunResult,
    RunSpec,
    SessionSpec,
)
from k8e.doors import shapes
from k8e.doors.mcp.cages import Cages
from k8e.doors.mcp.catalogue import ToolText
from k8e.doors.mcp.execution import Execution, Report
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.images import recognise
from k8e.doors.mcp.outputs import Kept
from k8e.doors.shapes import Json
from k8e.doors.specs import Fields, invalid
from k8e.engine import Runtime

MAX_FILE: Final = 8 << 20  # JSON carries it twice, base64 adds a third
PATIENCE: Final = 20.0  # for an answer, in one call
MAX_WAIT: Final = 300.0


@dataclass(frozen=True, slots=True)
class Image:
    data: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One JSON object, and what is shown beside it."""

    body: Json
    image: Image | None = None
    links: Mapping[str, Kept] = field(default_factory=dict)  # resources with all of an output


@dataclass(frozen=True, slots=True)
class Talk:
    """What a call comes with: how sessions are made for it, and what can be said to the client while it lasts; None: it
    does not want to hear it."""

    cages: Cages
    report: Report | None = None
    ask: Callable[[str, str], Awaitable[bool | None]] | None = None  # a person, who may leave it open; with its id
    heard: tuple[str, bool | None] | None = None  # the id of a question that this same call asked before, its answer


Tool = Callable[[Guest, Fields, Talk], Awaitable[Answer]]


async def run(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    if "command" in fields:
        return await run_command(guest, fields, talk)
    if "code" not in fields:
        raise invalid("code", "neither code nor command is given", hint="code is a script, command is a list of words")
    named = fields.take_text("session_id")
    limit = take_limit(fields)
    spec = RunSpec(
        "",
        code=fields.take_text("code"),
        language=fields.take_choice("language", Language) or Language.BASH,
        timeout=take_timeout(fields),
        workdir=fields.take_text("cwd"),
        env=fields.take_mapping("env"),
    )
    _refuse_wishes(fields, "code runs in a session")
    fields.finish()
    return await execute_in(guest, spec, named, talk, limit)


async def run_command(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    """In a sandbox that is made for it and does not outlive it."""
    for name in ("code", "language"):
        if name in fields:
            raise invalid(name, f"{name} is given together with command", hint="give one of them")
    argv = fields.take_texts("command")
    if not argv:
        raise invalid("command", "command is empty", hint="a list such as ['python3', '-c', 'print(1)']")
    limit = take_limit(fields)
    spec = RunSpec(
        "",
        argv=encode_words(argv),
        timeout=take_timeout(fields),
        workdir=fields.take_text("cwd"),
        env=fields.take_mapping("env"),
    )
    if named := fields.take_text("session_id"):
        _refuse_wishes(fields, "session_id names a session that is there")
        fields.finish()
        return await execute_in(guest, spec, named, talk, limit)
    made = await talk.cages.choose(guest, fields, talk.report, argv)
    spec = replace(spec, entrypoint=made.asked_image)
    answer = await _finish(guest, Execution(guest, talk.report, limit), lambda run: run.run_once(made.spec, spec))
    notes = await talk.cages.review(made)
    return replace(answer, body={**answer.body, "notes": list(notes)}) if notes else answer


def _refuse_wishes(fields: Fields, why: str) -> None:
    for name in ("profile", "compatibility_mode", "network", "image"):
        if name in fields:
            raise invalid(name, f"{name} is for a temporary sandbox, and {why}", hint="give command, and no session_id")


async def execute(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = _take_session(fields)
    words = fields.take_words("command")
    limit = take_limit(fields)
    spec = RunSpec(
        "",
        code=words if isinstance(words, str) else "",
        argv=() if isinstance(words, str) else encode_words(words),
        timeout=fields.take_number("timeout", RunSpec("").timeout),
        workdir=fields.take_text("workdir"),
        env=fields.take_mapping("env"),
    )
    fields.finish()
    return await execute_in(guest, spec, named, talk, limit)


async def execute_in(guest: Guest, spec: RunSpec, named: str, talk: Talk, limit: int) -> Answer:
    return await _finish(guest, Execution(guest, talk.report, limit), lambda run: run.run(spec, named))


async def _finish(guest: Guest, execution: Execution, work: Callable[[Execution], Awaitable[RunResult]]) -> Answer:
    result = await work(execution)
    body = shapes.shape_run(result)
    kept = execution.kept()
    if not kept:
        return Answer(body)
    if guest.outputs is None:
        execution.drop()
        return Answer(body)
    links = {guest.outputs.add(result.run_id, stream, content): content for stream, content in kept.items()}
    return Answer({**body, "full_output": dict(zip(kept, links, strict=True))}, links=links)


async def pip_install(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = _take_session(fields)
    packages = fields.take_texts("packages") or []
    fields.finish()

    async def install(session_id: str) -> RunResult:
        return await guest.service.pip_install(guest.caller, session_id, packages)

    result = await guest.use(named, install)
    output = (result.stdout + result.stderr).decode(errors="replace")
    return Answer({"output": output, **shapes.shape_run_summary(result)})


async def status(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    fields.finish()
    service = shapes.shape_status(await guest.service.status(guest.caller))
    return Answer({"available": service["available"], "session_id": guest.default, **service})


async def create_session(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    spec = SessionSpec(
        session_id=fields.take_text("session_id"),
        tenant=fields.take_text("tenant_id"),
        runtime=fields.take_choice("runtime_class", Runtime),
        allowed_hosts=fields.take_texts("allowed_hosts"),
    )
    fields.finish()
    return Answer(shapes.shape_created(await guest.create(spec)))


async def run_subagent(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = fields.take_text("parent_session_id")
    spec = ChildSpec(agent_type=fields.take_text("agent_type"), workspace_path=fields.take_text("workspace_path"))
    fields.finish()
    return Answer(shapes.shape_child(await guest.run_subagent(named, spec)))


async def destroy_session(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = "name" if "name" in fields else "session_id"
    session_id = fields.take_text(name)
    fields.finish()
    await guest.destroy(session_id)
    return Answer({"ok": True})


async def list_sessions(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    fields.finish()
    return Answer({"sessions": [shapes.shape_session(session) for session in await guest.sessions()]})


async def write_file(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = _take_session(fields)
    path = fields.take_text("path")
    mode = fields.take_text("mode", "w")
    if mode not in ("w", "a"):
        raise invalid("mode", f"{mode!r} is no way to write", hint="w replaces, a appends")
    encoding, content = _take_encoding(fields), fields.take_text("content")
    fields.finish()
    data = content.encode("utf-8", "surrogateescape") if encoding == "utf-8" else _decode_base64(content)
    written = [""]

    async def write(session_id: str) -> int:
        written[0] = session_id
        return await guest.service.write_file(guest.caller, session_id, path, data, append=mode == "a")

    size = await guest.use(named, write)
    return Answer({"ok": True, "path": path, "bytes": size, "session_id": written[0]})


async def read_file(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    """An image is shown beside the answer, and not once more in it."""
    path, session_id, content = await _read(guest, fields)
    facts: Json = {"bytes": len(content), "session_id": session_id}
    if kind := recognise(content):
        body = {"path": path, "encoding": "base64", "mime_type": kind, **facts}
        return Answer(body, image=Image(content, kind))
    return Answer({**shapes.shape_file(path, content), **facts})


async def read_data(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    encoding = _take_encoding(fields)
    path, session_id, content = await _read(guest, fields)
    body = shapes.shape_file(path, content)
    if encoding == "base64":
        body |= {"content": base64.b64encode(content).decode("ascii"), "encoding": encoding}
    return Answer({**body, "bytes": len(content), "session_id": session_id})


async def _read(guest: Guest, fields: Fields) -> tuple[str, str, bytes]:
    named = _take_session(fields)
    path = fields.take_text("path")
    fields.finish()

    async def read(session_id: str) -> tuple[str, bytes]:
        content = bytearray()
        pieces = await guest.service.download(guest.caller, session_id, path, length=MAX_FILE + 1)
        async for piece in pieces:
            content += piece
        return session_id, bytes(content)

    session_id, content = await guest.use(named, read)
    if len(content) > MAX_FILE:
        hint = "Read a part of it with sandbox_run: head -c, tail -c, sed -n."
        error = f"the file has more than {MAX_FILE} bytes, too many for one answer"
        raise Fault(Kind.INVALID, "file_too_large", error, hint=hint, field="path")
    return path, session_id, content


async def list_files(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = _take_session(fields)
    path, since = fields.take_text("path"), fields.take_number("since", 0)
    fields.finish()

    async def listing(session_id: str) -> Json:
        entries = await guest.service.list_files(guest.caller, session_id, path, since=since)
        return {"files": [shapes.shape_entry(entry) for entry in entries], "session_id": session_id}

    return Answer(await guest.use(named, listing))


async def confirm_action(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    """Asks a person, in the client's own dialogue where it has one; else there is an id to ask by."""
    named, approval_id = fields.take_text("session_id"), fields.take_text("approval_id")
    action, seconds = fields.take_text("action"), fields.take_number("timeout", PATIENCE)
    fields.finish()
    if bool(action) == bool(approval_id):
        raise invalid("action", "give action to ask, or approval_id to hear the answer, and not both")
    if approval_id:

        async def hear(session_id: str) -> Approval:
            return await guest.service.await_answer(guest.caller, approval_id, min(seconds, MAX_WAIT))

        # Without connections, the session is what leads to its questions.
        return _show_approval(await (guest.use(named, hear) if named else hear("")))

    async def ask(session_id: str) -> Approval:
        return await guest.service.ask(guest.caller, session_id, action)

    if talk.heard is not None:
        approval, answer = await guest.service.approval(guest.caller, talk.heard[0]), talk.heard[1]
    else:
        approval, answer = await guest.use(named, ask), None
        if talk.ask is not None and guest.known:
            question = f"An agent asks to do this in sandbox {approval.session_id}: {approval.action}"
            answer = await talk.ask(question, approval.approval_id)
    if answer is None or not guest.known:
        return _show_approval(approval)
    person = replace(guest.caller, dialogue=True)
    return _show_approval(await guest.service.answer(person, approval.approval_id, approved=answer))


def _show_approval(approval: Approval) -> Answer:
    body = shapes.shape_approval(approval)
    if approval.status is ApprovalStatus.PENDING:
        body["hint"] = (
            f"A person answers with: k8e sandbox approve {approval.approval_id} (or --reject). "
            "Call again with this approval_id and session_id; go on only when approved is true."
        )
    return Answer(body)


def _take_session(fields: Fields) -> str:
    named, alias = fields.take_text("session_id"), fields.take_text("name")
    if named and alias and named != alias:
        raise invalid("name", "session_id and name are two names for one thing, and differ", hint="give one of them")
    return named or alias


def take_timeout(fields: Fields) -> float:
    if "timeout" in fields and "timeout_ms" in fields:
        raise invalid("timeout_ms", "timeout and timeout_ms are both given", hint="give one of them")
    default = RunSpec("").timeout
    if "timeout_ms" in fields:
        return fields.take_number("timeout_ms", default * 1000) / 1000
    return fields.take_number("timeout", default)


def take_limit(fields: Fields) -> int:
    limit = fields.take_count("max_output", OUTPUT_LIMIT)
    if not 2 <= limit <= OUTPUT_LIMIT:
        raise invalid("max_output", f"max_output must be 2 to {OUTPUT_LIMIT}")
    return limit


def _take_encoding(fields: Fields) -> str:
    encoding = fields.take_text("encoding", "utf-8")
    if encoding not in ("utf-8", "base64"):
        raise invalid("encoding", f"{encoding!r} is no encoding", hint="utf-8 or base64")
    return encoding


def _decode_base64(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid("content", "content is not base64") from error


def encode_words(words: list[str]) -> tuple[bytes, ...]:
    return tuple(word.encode("utf-8", "surrogateescape") for word in words)


TABLE: Final[Mapping[str, Tool]] = {
    "sandbox_run": run,
    "sandbox_status": status,
    "sandbox_create_session": create_session,
    "sandbox_destroy_session": destroy_session,
    "sandbox_exec": execute,
    "sandbox_exec_stream": execute,
    "sandbox_write_file": write_file,
    "sandbox_read_file": read_file,
    "sandbox_list_files": list_files,
    "sandbox_pip_install": pip_install,
    "sandbox_run_subagent": run_subagent,
    "sandbox_confirm_action": confirm_action,
    "sandbox_list": list_sessions,
    "sandbox_remove": destroy_session,
    "sandbox_file_write": write_file,
    "sandbox_file_read": read_data,
}


async def call(tool: ToolText, work: Tool, guest: Guest, arguments: Mapping[str, Any], talk: Talk) -> Answer:
    """Raises Fault."""
    for name in arguments:
        if name not in tool.inputs:
            hint = f"{tool.name} takes: {', '.join(tool.inputs) or 'nothing'}"
            raise invalid(name[:64], f"{name[:64]!r} is no parameter of {tool.name}", hint=hint)
    for name in tool.required:
        if arguments.get(name) is None:
            raise invalid(name, f"{name} is missing", hint=f"{tool.name} needs: {', '.join(tool.required)}")
    try:
        return await work(guest, Fields(arguments), talk)
    except Fault as fault:
        fault.field = _call_it(fault.field, tool)
        raise


def _call_it(field: str, tool: ToolText) -> str:
    """A parameter as this tool calls it, which the service may know by another name."""
    other = {"workdir": "cwd", "session_id": "name"}.get(field, "")
    return other if field not in tool.inputs and other in tool.inputs else field
