"""Texts about sessions in tools: they depend on how a later call finds the session of an earlier one. The catalogue has
the words for connections, this module the others. Plain data, no SDK."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from k8e.doors.mcp.clients import Finding
from k8e.doors.mcp.tools import schemas
from k8e.doors.mcp.tools.catalogue import COMMAND_WORDS
from k8e.doors.mcp.tools.schemas import Schema, ToolText, text

_HANDLE: Final = text(
    "Which session: the session_id of an earlier answer. Left out: a new, empty session, which later calls find by the "
    "session_id of the answer."
)
_DESCRIPTIONS: Final[Mapping[Finding, Mapping[str, str]]] = {
    Finding.CONNECTION: {},
    Finding.TENANT: {
        "sandbox_create_session": "A sandbox of its own, with a runtime and a list of hosts of its own. It stays when "
        "this connection ends, until it is destroyed or expires.",
    },
    Finding.HANDLE: {
        "sandbox_run": "Run code or a command, isolated from the machine. With `code`: in the session that session_id "
        "names. Left out: in a new, empty session. Its session_id is in the answer: give it to the next call, so that "
        "files and installed packages are there. A session ends 15 minutes after its last use, or 5 minutes after the "
        f"first answer if no call has named it. {COMMAND_WORDS}",
        "sandbox_status": "Whether sandboxes work here. session_id is null: each call names its session.",
        "sandbox_create_session": "A sandbox of its own, with a runtime and a list of hosts of its own. Other calls "
        "find it by the session_id of the answer. It ends 15 minutes after its last use, or 5 minutes after this "
        "answer if no call has named it.",
    },
}
# Without a connection a session's id is a secret: it cannot be chosen, and none is listed.
_UNLISTED: Final = ("sandbox_create", "sandbox_start", "sandbox_stop", "sandbox_list")
_UNLISTED_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {"sandbox_create_session": ("session_id", "tenant_id")}


def list_tools(tools: Iterable[ToolText], finding: Finding) -> list[ToolText]:
    """The tools that a client of this kind is told about, with words that are true for it."""
    if finding is not Finding.HANDLE:
        return [_describe(tool, finding) for tool in tools]
    return [_name_handle(_describe(tool, finding)) for tool in tools if tool.name not in _UNLISTED]


def _describe(tool: ToolText, finding: Finding) -> ToolText:
    return replace(tool, description=_DESCRIPTIONS[finding].get(tool.name, tool.description))


def _name_handle(tool: ToolText) -> ToolText:
    unlisted = _UNLISTED_INPUTS.get(tool.name, ())
    inputs: dict[str, Schema] = {
        name: _HANDLE if schema in (schemas.SESSION, schemas.PARENT) else schema
        for name, schema in tool.inputs.items()
        if name not in unlisted
    }
    return replace(tool, inputs=inputs)
