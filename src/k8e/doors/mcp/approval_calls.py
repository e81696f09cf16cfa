"""The tool that asks a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.model import Approval, ApprovalStatus
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.answers import Answer, Talk
from k8e.doors.mcp.guest import Guest

PATIENCE: Final = 20.0  # for an answer, in one call
MAX_WAIT: Final = 300.0


async def confirm_action(guest: Guest, fields: Fields, talk: Talk) -> Answer:
    """Asks a person, in the client's own dialogue where it has one; else there is an id to ask by."""
    named, approval_id = fields.take_text("session_id"), fields.take_text("approval_id")
    action, seconds = fields.take_text("action"), fields.take_number("timeout", PATIENCE)
    fields.finish()
    if bool(action) == bool(approval_id):
        raise invalid("action", "give action to ask, or approval_id to hear the answer, and not both")
    if approval_id:

        async def hear(session_id: str) -> Approval:
            return await guest.service.approvals.wait(guest.caller, approval_id, min(seconds, MAX_WAIT))

        # Without connections, the session is what leads to its questions.
        return _show_approval(await (guest.use(named, hear) if named else hear("")))

    async def ask(session_id: str) -> Approval:
        return await guest.service.approvals.ask(guest.caller, session_id, action)

    if talk.heard is not None:
        approval, answer = await guest.service.approvals.get(guest.caller, talk.heard[0]), talk.heard[1]
    else:
        approval, answer = await guest.use(named, ask), None
        if talk.ask is not None and guest.known and guest.service.approvals.hears_dialogues:
            question = f"An agent asks to do this in sandbox {approval.session_id}: {approval.action}"
            answer = await talk.ask(question, approval.approval_id)
    if answer is None or not guest.known:
        return _show_approval(approval)
    person = replace(guest.caller, dialogue=True)
    return _show_approval(await guest.service.approvals.answer(person, approval.approval_id, approved=answer))


def find_command(approval: Approval) -> str:
    """The asker cannot answer; root can answer all others."""
    if approval.asker == "uid:0":
        return f"k8e sandbox approve --key {approval.approval_id}"
    sudo = "sudo " if approval.asker.startswith("uid:") else ""
    return f"{sudo}k8e sandbox approve {approval.approval_id}"


def _show_approval(approval: Approval) -> Answer:
    body = answers.show_approval(approval)
    if approval.status is ApprovalStatus.PENDING:
        body["hint"] = (
            f"A person answers with: {find_command(approval)} (or --reject). "
            "Call again with this approval_id and session_id; go on only when approved is true."
        )
    return Answer(body)
