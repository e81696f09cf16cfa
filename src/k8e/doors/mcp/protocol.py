"""The SDK's server for one client: lists the tools, calls them, and serves kept outputs as resources."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from typing import Any, Final

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import format_event
from k8e.doors.http.errors import internal_error
from k8e.doors.mcp.answers import describe_output, describe_tool, show_answer, show_output
from k8e.doors.mcp.bridge import Bridge
from k8e.doors.mcp.clients import Finding, McpClient
from k8e.doors.mcp.errors import show_error
from k8e.doors.mcp.tools.progress import SendProgress
from k8e.doors.mcp.tools.session_specs import NO_FOLDERS, ClientFolders, SpecResolver
from k8e.doors.mcp.tools.texts import list_tools
from k8e.doors.mcp.tools.tool import CallContext
from k8e.doors.mcp.toolsets import K8E, TOOLSETS, Toolset

APPROVAL: Final = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Approve", "description": "Let the agent do this."}},
    "required": ["approve"],
}
QUESTION: Final = "approve"
log = logging.getLogger("k8e.doors.mcp")

SdkContext = Any  # the SDK leaves its parameters open


class ProtocolServer:
    def __init__(
        self,
        client: McpClient,
        toolset: Toolset = K8E,
        folders: ClientFolders = NO_FOLDERS,
        bridge: Bridge | None = None,
    ) -> None:
        self._client = client
        self._toolset = toolset
        self._specs = SpecResolver(toolset, folders, bridge)
        tools = toolset.tools
        self.server: Server[Any] = Server(
            toolset.name,
            title=toolset.title,
            version=importlib.metadata.version("k8e"),
            instructions=toolset.instructions[client.finding],
            get_tool_input_schema=lambda name: tools[name].input_schema if name in tools else None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )

    def note_restart(self) -> None:
        self._client.note_restart()

    async def _list_tools(self, ctx: SdkContext, params: object) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=describe_tools(self._toolset.name, self._client.finding, ctx.protocol_version)
        )

    async def _call_tool(
        self, ctx: SdkContext, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        tool = self._toolset.tools.get(params.name)
        if tool is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"Unknown tool: {params.name[:100]}")
        try:
            context = make_context(ctx, params, self._specs)
            answer = await self._toolset.call(tool, self._client, params.arguments or {}, context)
            return show_answer(answer, ctx.protocol_version)
        except InputRequired as required:
            return required.result
        except Fault as fault:
            return show_error(fault, self._client.explain(fault))
        except Exception:
            log.exception("%s", format_event("call_failed", {"tool": tool.name, "caller": self._client.caller.label}))
            return show_error(internal_error())

    async def _list_resources(self, ctx: SdkContext, params: object) -> types.ListResourcesResult:
        outputs = self._client.outputs.entries.items()
        return types.ListResourcesResult(
            resources=[types.Resource(**describe_output(uri, output)) for uri, output in outputs]
        )

    async def _list_templates(self, ctx: SdkContext, params: object) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[])

    async def _read_resource(
        self, ctx: SdkContext, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        output = self._client.outputs.find(params.uri)
        if output is None:
            message = "Resource not found: outputs are kept as long as their connection, the latest of them"
            raise MCPError(code=types.INVALID_PARAMS, message=message, data={"uri": params.uri[:200]})
        return types.ReadResourceResult(contents=[show_output(params.uri, output.read())])


@functools.cache
def describe_tools(toolset: str, finding: Finding, version: str) -> list[types.Tool]:
    tools = next(each.tools for each in TOOLSETS.values() if each.name == toolset)
    return [describe_tool(tool, version) for tool in list_tools(tools.values(), finding)]


class InputRequired(Exception):
    """Carries a question to the client where the server cannot send requests of its own (the newest protocol): the
    question is a result, and the client calls again with the answer."""

    def __init__(self, question: str, approval_id: str) -> None:
        super().__init__(question)
        form = types.ElicitRequestFormParams(message=question, requested_schema=APPROVAL)
        requests: types.InputRequests = {QUESTION: types.ElicitRequest(params=form)}
        self.result = types.InputRequiredResult(input_requests=requests, request_state=approval_id)


def make_context(ctx: SdkContext, params: types.CallToolRequestParams, specs: SpecResolver) -> CallContext:
    able = ctx.session.client_capabilities
    if able is None or able.elicitation is None:
        return CallContext(specs, find_progress(ctx))

    async def ask(question: str, approval_id: str) -> bool | None:
        if not ctx.session.can_send_request:
            raise InputRequired(question, approval_id)
        return read_verdict(await ctx.session.elicit_form(question, APPROVAL, ctx.request_id))

    answer = (params.input_responses or {}).get(QUESTION)
    if params.request_state and isinstance(answer, types.ElicitResult):
        return CallContext(specs, find_progress(ctx), ask, (params.request_state, read_verdict(answer)))
    return CallContext(specs, find_progress(ctx), ask)


def find_progress(ctx: SdkContext) -> SendProgress | None:
    """None: the client gave no progress token."""
    if not ctx.meta or ctx.meta.get("progress_token") is None:
        return None

    async def send(progress: float, message: str) -> None:
        await ctx.session.report_progress(progress, message=message)

    return send


def read_verdict(answer: types.ElicitResult) -> bool | None:
    """None: the person closed the dialogue without an answer."""
    if answer.action == "accept":
        return bool(answer.content and answer.content.get("approve") is True)
    return False if answer.action == "decline" else None
