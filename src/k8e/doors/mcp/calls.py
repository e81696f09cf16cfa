"""Which tool is which call of the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from k8e.core.errors import Fault
from k8e.core.model import ChildSpec, Language, RunResult, RunSpec, SessionSpec
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.answers import Answer, Talk, Tool
from k8e.doors.mcp.approval_calls import confirm_action
from k8e.doors.mcp.arguments import encode_words, take_command, take_limit, take_session, take_timeout
from k8e.doors.mcp.execution import Execution
from k8e.doors.mcp.file_calls import list_files, read_data, read_file, write_file
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.schemas import ToolText
from k8e.engine import Runtime


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
    words, spec = take_command(fields)
    limit = take_limit(fields)
    if named := fields.take_text("session_id"):
        _refuse_wishes(fields, "session_id names a session that is there")
        fields.finish()
        return await execute_in(guest, spec, named, talk, limit)
    made = await talk.cages.choose(guest, fields, talk.report, words)
    spec = replace(spec, entrypoint=made.asked_image)
    answer = await _finish(guest, Execution(guest, talk.report, limit), lambda run: run.run_once(made.spec, spec))
    notes = await talk.cages.review(made)
    return replace(answer, body={**answer.body, "notes": list(notes)}) if notes else answer


def _refuse_wishes(fields: Fields, why: str) -> None:
    for name in ("profile", "compatibility_mode", "network", "image"):
        if name in fields:
            raise invalid(name, f"{name} is for a temporary sandbox, and {why}", hint="give command, and no session_id")


async def execute(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = take_session(fields)
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
    body = answers.show_run(result)
    kept = execution.kept()
    if not kept:
        return Answer(body)
    if guest.outputs is None:
        execution.drop()
        return Answer(body)
    links = {guest.outputs.add(result.run_id, stream, content): content for stream, content in kept.items()}
    return Answer({**body, "full_output": dict(zip(kept, links, strict=True))}, links=links)


async def pip_install(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = take_session(fields)
    packages = fields.take_texts("packages") or []
    fields.finish()

    async def install(session_id: str) -> RunResult:
        return await guest.service.runs.pip_install(guest.caller, session_id, packages)

    result = await guest.use(named, install)
    output = (result.stdout + result.stderr).decode(errors="replace")
    return Answer({"output": output, **answers.show_run_summary(result)})


async def status(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    fields.finish()
    service = answers.show_status(await guest.service.status(guest.caller))
    return Answer({"available": service["available"], "session_id": guest.default, **service})


async def create_session(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    spec = SessionSpec(
        session_id=fields.take_text("session_id"),
        tenant=fields.take_text("tenant_id"),
        runtime=fields.take_choice("runtime_class", Runtime),
        allowed_hosts=fields.take_texts("allowed_hosts"),
    )
    fields.finish()
    return Answer(answers.show_created(await guest.create(spec)))


async def run_subagent(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    named = fields.take_text("parent_session_id")
    spec = ChildSpec(agent_type=fields.take_text("agent_type"), workspace_path=fields.take_text("workspace_path"))
    fields.finish()
    return Answer(answers.show_child(await guest.run_subagent(named, spec)))


async def destroy_session(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = "name" if "name" in fields else "session_id"
    session_id = fields.take_text(name)
    fields.finish()
    await guest.destroy(session_id)
    return Answer({"ok": True})


async def list_sessions(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    fields.finish()
    return Answer({"sessions": [answers.show_session(session) for session in await guest.sessions()]})


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
