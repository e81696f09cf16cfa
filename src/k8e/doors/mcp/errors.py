"""Errors as the protocol has them: results of a tool call, so that a model reads them and tries again; and errors of
JSON-RPC for what no model has written."""

from __future__ import annotations

import json
from typing import Final

import mcp_types as types

from k8e.core.errors import Fault
from k8e.doors.http.errors import HttpRefusal, describe
from k8e.doors.mcp.answers import write_json

# The service's own hints name commands of the command line; both toolsets have these tools.
_HINTS: Final = {
    "session_stopped": "Its files are kept. Start it with sandbox_start.",
    "session_not_found": "sandbox_list says which there are, sandbox_create makes one.",
    "session_exists": "Use it, end it first with sandbox_remove, or choose another name.",
}


def show_error(problem: Fault | HttpRefusal, hint: str = "") -> types.CallToolResult:
    """As text only: clients check structured content against the tool's output schema."""
    _, body = describe(problem)
    body["hint"] = hint or _HINTS.get(str(body["code"]), body["hint"])
    return types.CallToolResult(content=[types.TextContent(text=write_json(body))], is_error=True)


def refuse_message(code: int, message: str, **more: object) -> types.JSONRPCError:
    """Answers a message that was not understood, and so has no id."""
    return types.JSONRPCError(jsonrpc="2.0", id=None, error=types.ErrorData(code=code, message=message, **more))


def refuse_stopped(request_id: types.RequestId) -> types.JSONRPCError:
    message = "the daemon was stopped before this call had ended, and the call was ended with it"
    hint = "The next call goes to the next daemon. Sessions that ended with this one are gone."
    error = types.ErrorData(
        code=types.CONNECTION_CLOSED, message=message, data={"code": "daemon_stopped", "hint": hint}
    )
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


def refuse_bytes(fault: Fault) -> types.JSONRPCError:
    data = {"code": fault.code, "detail": fault.detail, "hint": fault.hint, "retry_after": fault.retry_after}
    return refuse_message(types.INVALID_REQUEST, fault.error, data=data)


def refuse_line(line: bytes | None, error: ValueError) -> types.JSONRPCError:
    """JSON that is no message is another error than bytes that are no JSON."""
    if line is None:
        return refuse_message(types.PARSE_ERROR, f"Parse error: {error}")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return refuse_message(types.PARSE_ERROR, "Parse error")
    return refuse_message(types.INVALID_REQUEST, "Invalid request")
