"""The tool that asks a person for an approval."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.model import Approval, ApprovalStatus
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.tools.tool import CallContext, ToolAnswer

WAIT: Final = 20.0  # seconds for an answer, in one call
MAX_WAIT: Final = 300.0


async def confirm_action(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    """Asks in the client's own dialogue where it has one. Otherwise the answer is an id to ask again with."""
    named, approval_id = fields.take_text("session_id"), fields.take_text("approval_id")
    action, seconds = fields.take_text("action"), fields.take_number("timeout", WAIT)
    fields.finish()
    if bool(action) == bool(approval_id):
        raise invalid("action", "give action to ask, or approval_id to hear the answer, and not both")
    if approval_id:

        async def wait(session_id: str) -> Approval:
            return await client.service.approvals.wait(client.caller, approval_id, min(seconds, MAX_WAIT))

        # A stateless client reaches the approval through the session's name.
        return _show_approval(await (client.use(named, wait) if named else wait("")))

    async def ask(session_id: str) -> Approval:
        return await client.service.approvals.ask(client.caller, session_id, action)

    if context.answered is not None:
        approval, answer = await client.service.approvals.get(client.caller, context.answered[0]), context.answered[1]
    else:
        approval, answer = await client.use(named, ask), None
        if context.ask is not None and client.known and client.service.approvals.hears_dialogues:
            question = f"An agent asks to do this in sandbox {approval.session_id}: {approval.action}"
            answer = await context.ask(question, approval.approval_id)
    if answer is None or not client.known:
        return _show_approval(approval)
    person = replace(client.caller, dialogue=True)
    return _show_approval(await client.service.approvals.answer(person, approval.approval_id, approved=answer))


def find_command(approval: Approval) -> str:
    """Names the command of a person who may answer: not the caller that asked, unless that is root with a key."""
    if approval.asker == "uid:0":
        return f"k8e sandbox approve --key {approval.approval_id}"
    sudo = "sudo " if approval.asker.startswith("uid:") else ""
    return f"{sudo}k8e sandbox approve {approval.approval_id}"


def _show_approval(approval: Approval) -> ToolAnswer:
    body = answers.show_approval(approval)
    if approval.status is ApprovalStatus.PENDING:
        body["hint"] = (
            f"A person answers with: {find_command(approval)} (or --reject). "
            "Call again with this approval_id and session_id; go on only when approved is true."
        )
    return ToolAnswer(body)
