"""The SDK's server for one guest: its words to ours and back. What is wrong with a call is said in its result, so that
a model can read it and try again; only what no model has written is an error of the protocol."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import logging
from typing import Any, Final

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import format_event
from k8e.doors.http.answers import Json
from k8e.doors.http.errors import HttpRefusal, describe, internal_error
from k8e.doors.mcp.answers import Answer, Talk
from k8e.doors.mcp.bridge import Bridge
from k8e.doors.mcp.cages import Cages
from k8e.doors.mcp.calls import call
from k8e.doors.mcp.execution import Report
from k8e.doors.mcp.fronts import AGENTKERNEL, FRONTS, K8E, NOWHERE, Front, Surroundings
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.kernel_calls import ALL, KERNEL
from k8e.doors.mcp.outputs import Kept
from k8e.doors.mcp.schemas import ToolText

APPROVAL: Final = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Approve", "description": "Let the agent do this."}},
    "required": ["approve"],
}

QUESTION: Final = "approve"

log = logging.getLogger("k8e.doors.mcp")

Context = Any  # of the SDK, which leaves its parameters open


def describe_tool(tool: ToolText) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations=types.ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.reads,
            destructive_hint=tool.destroys,
            idempotent_hint=tool.reads or tool.repeats,
            open_world_hint=tool.reaches,
        ),
    )


_DESCRIBED: Final = {front.name: [describe_tool(tool) for tool in front.tools.values()] for front in FRONTS.values()}
_CALLS: Final = {K8E.name: ALL, AGENTKERNEL.name: KERNEL}


class Desk:
    def __init__(
        self,
        guest: Guest,
        front: Front = K8E,
        surroundings: Surroundings = NOWHERE,
        bridge: Bridge | None = None,
    ) -> None:
        self._guest = guest
        self._front = front
        self._cages = Cages(front, surroundings, bridge)
        tools = front.tools
        self.server: Server[Any] = Server(
            front.name,
            title=front.title,
            version=importlib.metadata.version("k8e"),
            instructions=front.instructions,
            get_tool_input_schema=lambda name: tools[name].input_schema if name in tools else None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )

    async def _list_tools(self, ctx: Context, params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=_DESCRIBED[self._front.name])

    async def _call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        tool = self._front.tools.get(params.name)
        if tool is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name[:100]}")
        try:
            talk = find_talk(ctx, params, self._cages)
            work = _CALLS[self._front.name][tool.name]
            return show_answer(await call(tool, work, self._guest, params.arguments or {}, talk))
        except Unanswered as unanswered:
            return unanswered.result
        except Fault as fault:
            return show_problem(fault)
        except Exception:
            log.exception("%s", format_event("call_failed", {"tool": tool.name, "caller": self._guest.caller.label}))
            return show_problem(internal_error())

    async def _list_resources(self, ctx: Context, params: object) -> types.ListResourcesResult:
        kept = self._guest.outputs.entries if self._guest.outputs is not None else {}
        return types.ListResourcesResult(
            resources=[types.Resource(**describe_output(uri, output)) for uri, output in kept.items()]
        )

    async def _list_templates(self, ctx: Context, params: object) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[])

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        kept = self._guest.outputs.find(params.uri) if self._guest.outputs is not None else None
        if kept is None:
            message = "Resource not found: outputs are kept as long as their connection, the latest of them"
            raise MCPError(code=types.INVALID_PARAMS, message=message, data={"uri": params.uri[:200]})
        return types.ReadResourceResult(contents=[show_output(params.uri, kept.read())])


def find_report(ctx: Context) -> Report | None:
    """None: nobody asked to be told."""
    if not ctx.meta or ctx.meta.get("progress_token") is None:
        return None

    async def report(size: float, latest: str) -> None:
        await ctx.session.report_progress(size, message=latest)

    return report


class Unanswered(Exception):
    """The newest protocol has no requests of a server's own: a question is a result, and the call comes again with what
    was answered."""

    def __init__(self, question: str, approval_id: str) -> None:
        super().__init__(question)
        form = types.ElicitRequestFormParams(message=question, requested_schema=APPROVAL)
        requests: types.InputRequests = {QUESTION: types.ElicitRequest(params=form)}
        self.result = types.InputRequiredResult(input_requests=requests, request_state=approval_id)


def find_talk(ctx: Context, params: types.CallToolRequestParams, cages: Cages) -> Talk:
    able = ctx.session.client_capabilities
    if able is None or able.elicitation is None:
        return Talk(cages, find_report(ctx))

    async def ask(question: str, approval_id: str) -> bool | None:
        if not ctx.session.can_send_request:
            raise Unanswered(question, approval_id)
        return read_verdict(await ctx.session.elicit_form(question, APPROVAL, ctx.request_id))

    answer = (params.input_responses or {}).get(QUESTION)
    if params.request_state and isinstance(answer, types.ElicitResult):
        return Talk(cages, find_report(ctx), ask, (params.request_state, read_verdict(answer)))
    return Talk(cages, find_report(ctx), ask)


def read_verdict(answer: types.ElicitResult) -> bool | None:
    """None: it was left open."""
    if answer.action == "accept":
        return bool(answer.content and answer.content.get("approve") is True)
    return False if answer.action == "decline" else None


def show_answer(answer: Answer) -> types.CallToolResult:
    content: list[types.ContentBlock] = [types.TextContent(text=write_json(answer.body))]
    if answer.image is not None:
        data = base64.b64encode(answer.image.data).decode("ascii")
        content.append(types.ImageContent(data=data, mime_type=answer.image.kind))
    content.extend(types.ResourceLink(**describe_output(uri, kept)) for uri, kept in answer.links.items())
    return types.CallToolResult(content=content, structured_content=answer.body)


# What helps an agent is a tool, where the service's own words are for a person's command line. Both fronts have these.
_HINTS: Final = {
    "session_stopped": "Its files are kept. Start it with sandbox_start.",
    "session_not_found": "sandbox_list says which there are, sandbox_create makes one.",
    "session_exists": "Use it, end it first with sandbox_remove, or choose another name.",
}


def show_problem(problem: Fault | HttpRefusal) -> types.CallToolResult:
    """As text only: clients check structured content against the schema of what was hoped for."""
    _, body = describe(problem)
    body["hint"] = _HINTS.get(str(body["code"]), body["hint"])
    return types.CallToolResult(content=[types.TextContent(text=write_json(body))], is_error=True)


def describe_output(uri: str, kept: Kept) -> Json:
    *_, run_id, stream = uri.split("/")
    description = f"All of the {stream} of run {run_id}."
    if kept.size < kept.total:
        description = f"The first {kept.size} of the {kept.total} bytes of the {stream} of run {run_id}."
    facts = {"name": f"{run_id}-{stream}", "title": f"{stream} of {run_id}", "mime_type": "text/plain"}
    return {"uri": uri, "description": description, "size": kept.size, **facts}


def show_output(uri: str, content: bytes) -> types.TextResourceContents | types.BlobResourceContents:
    try:
        return types.TextResourceContents(uri=uri, text=content.decode(), mime_type="text/plain")
    except UnicodeDecodeError:
        blob = base64.b64encode(content).decode("ascii")
        return types.BlobResourceContents(uri=uri, blob=blob, mime_type="application/octet-stream")


def write_json(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False)
