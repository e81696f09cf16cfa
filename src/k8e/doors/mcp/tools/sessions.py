"""The tools that make, list and end sessions, and say whether the service is there."""

from __future__ import annotations

from k8e.core.model import ChildSpec, SessionSpec
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.tools.tool import CallContext, ToolAnswer
from k8e.engine import Runtime


async def status(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    fields.finish()
    service = answers.show_status(await client.service.status(client.caller))
    return ToolAnswer({"available": service["available"], "session_id": client.default, **service})


async def create_session(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    spec = SessionSpec(
        session_id=fields.take_text("session_id"),
        tenant=fields.take_text("tenant_id"),
        runtime=fields.take_choice("runtime_class", Runtime),
        allowed_hosts=fields.take_texts("allowed_hosts"),
    )
    fields.finish()
    return ToolAnswer(answers.show_created(await client.create(spec)))


async def run_subagent(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = fields.take_text("parent_session_id")
    spec = ChildSpec(agent_type=fields.take_text("agent_type"), workspace_path=fields.take_text("workspace_path"))
    fields.finish()
    return ToolAnswer(answers.show_child(await client.create_child(named, spec)))


async def destroy_session(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    session_id = fields.take_text("name" if "name" in fields else "session_id")
    fields.finish()
    await client.destroy(session_id)
    return ToolAnswer({"ok": True})


async def list_sessions(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    fields.finish()
    return ToolAnswer({"sessions": [answers.show_session(session) for session in await client.sessions()]})
