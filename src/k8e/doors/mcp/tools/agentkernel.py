"""The tools of agentkernel: sandboxes that are made by name, stopped and started, and commands in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import Phase, Session
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.requests import take_command, take_limit
from k8e.doors.mcp.tools.runs import run_in_session
from k8e.doors.mcp.tools.tool import CallContext, ToolAnswer
from k8e.profiles.errors import ProfileError
from k8e.profiles.sandbox_policy import check_name

_STATES: Final[Mapping[Phase, str]] = {
    Phase.CREATING: "starting",
    Phase.STARTING: "starting",
    Phase.ACTIVE: "running",
    Phase.STOPPING: "stopping",
    Phase.STOPPED: "stopped",
}


async def create(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    name = take_name(fields)
    resolved = await context.specs.resolve(client, fields, context.send_progress, name=name, persistent=True)
    session = await client.create(replace(resolved.spec, tenant=client.kept))
    notes = {"notes": list(resolved.notes)} if resolved.notes else {}
    return ToolAnswer({**shape_state(session), **answers.show_created(session), **notes})


async def start(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    name = take_name(fields)
    fields.finish()
    return ToolAnswer(
        shape_state(await client.use(name, lambda one: client.service.sessions.start(client.caller, one)))
    )


async def stop(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    name = take_name(fields)
    fields.finish()
    return ToolAnswer(shape_state(await client.use(name, lambda one: client.service.sessions.stop(client.caller, one))))


async def list_sandboxes(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    fields.finish()
    return ToolAnswer({"sandboxes": [shape_sandbox(session) for session in await client.sessions()]})


async def execute(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    name = take_name(fields)
    _, spec = take_command(fields)
    limit = take_limit(fields)
    fields.finish()
    return await run_in_session(client, spec, name, context, limit)


def take_name(fields: Fields) -> str:
    try:
        return check_name(fields.take_text("name"))
    except ProfileError as problem:
        raise Fault(Kind.INVALID, "invalid_argument", problem.error, hint=problem.hint, field="name") from problem


def shape_state(session: Session) -> Json:
    return {"name": session.session_id, "state": _STATES.get(session.phase, session.phase.value)}


def shape_sandbox(session: Session) -> Json:
    return {
        **shape_state(session),
        "image": session.image,
        "profile": session.labels.get("profile", ""),
        "mode": session.labels.get("mode", ""),
        "runtime": session.runtime.value,
        **answers.show_emulated(session),
        "created": session.created,
        "policy": answers.show_policy(session),
    }
