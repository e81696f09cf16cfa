"""agentkernel's tools: sandboxes that are made by name, stopped, started and removed, and commands in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import Phase, Session
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.answers import Answer, Talk, Tool
from k8e.doors.mcp.arguments import take_command, take_limit
from k8e.doors.mcp.calls import TABLE, destroy_session, execute_in, run_command
from k8e.doors.mcp.file_calls import read_data, write_file
from k8e.doors.mcp.guest import Guest
from k8e.profiles.errors import ProfileError
from k8e.profiles.sandbox_policy import check_name

_STATES: Final[Mapping[Phase, str]] = {
    Phase.CREATING: "starting",
    Phase.STARTING: "starting",
    Phase.ACTIVE: "running",
    Phase.STOPPING: "stopping",
    Phase.STOPPED: "stopped",
}


async def create(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = take_name(fields)
    made = await talk.cages.choose(guest, fields, talk.report, name=name, persistent=True)
    session = await guest.create(replace(made.spec, tenant=guest.kept))
    notes = {"notes": list(made.notes)} if made.notes else {}
    return Answer({**shape_state(session), **answers.show_created(session), **notes})


async def start(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = take_name(fields)
    fields.finish()
    return Answer(shape_state(await guest.use(name, lambda one: guest.service.sessions.start(guest.caller, one))))


async def stop(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = take_name(fields)
    fields.finish()
    return Answer(shape_state(await guest.use(name, lambda one: guest.service.sessions.stop(guest.caller, one))))


async def list_sandboxes(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    fields.finish()
    return Answer({"sandboxes": [shape_sandbox(session) for session in await guest.sessions()]})


async def execute(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    name = take_name(fields)
    _, spec = take_command(fields)
    limit = take_limit(fields)
    fields.finish()
    return await execute_in(guest, spec, name, talk, limit)


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
        "created": session.created,
        "policy": answers.show_policy(session),
    }


ALL: Final[Mapping[str, Tool]] = {**TABLE, "sandbox_create": create, "sandbox_start": start, "sandbox_stop": stop}
KERNEL: Final[Mapping[str, Tool]] = {
    "sandbox_run": run_command,
    "sandbox_create": create,
    "sandbox_exec": execute,
    "sandbox_list": list_sandboxes,
    "sandbox_remove": destroy_session,
    "sandbox_file_write": write_file,
    "sandbox_file_read": read_data,
    "sandbox_start": start,
    "sandbox_stop": stop,
}
