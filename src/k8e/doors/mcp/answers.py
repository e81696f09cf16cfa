"""Turns the answers of tools, and the catalogue, into the types of the SDK."""

from __future__ import annotations

import base64
import json
from typing import Final

import mcp_types as types
from mcp_types.version import is_version_at_least

from k8e.doors.http.answers import Json
from k8e.doors.mcp.resources import OutputResource
from k8e.doors.mcp.tools.schemas import ToolText
from k8e.doors.mcp.tools.tool import ToolAnswer

# The first versions of the protocol with annotations of tools; and with structured content and resource links.
ANNOTATED: Final = "2025-03-26"
STRUCTURED: Final = "2025-06-18"


def describe_tool(tool: ToolText, version: str) -> types.Tool:
    described = types.Tool(name=tool.name, description=tool.description, input_schema=tool.input_schema)
    if is_version_at_least(version, ANNOTATED):
        described.annotations = types.ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.reads,
            destructive_hint=tool.destroys,
            idempotent_hint=tool.reads or tool.repeats,
            open_world_hint=tool.reaches,
        )
    if is_version_at_least(version, STRUCTURED):
        described.title, described.output_schema = tool.title, tool.output_schema
    return described


def show_answer(answer: ToolAnswer, version: str) -> types.CallToolResult:
    """A client refuses the whole result for one block of a kind that its version does not have."""
    content: list[types.ContentBlock] = [types.TextContent(text=write_json(answer.body))]
    for image in answer.images:
        data = base64.b64encode(image.data).decode("ascii")
        content.append(types.ImageContent(data=data, mime_type=image.mime_type))
    if not is_version_at_least(version, STRUCTURED):
        return types.CallToolResult(content=content)
    content.extend(types.ResourceLink(**describe_output(uri, output)) for uri, output in answer.links.items())
    return types.CallToolResult(content=content, structured_content=answer.body)


def describe_output(uri: str, output: OutputResource) -> Json:
    *_, run_id, stream = uri.split("/")
    description = f"All of the {stream} of run {run_id}."
    if output.size < output.total:
        description = f"The first {output.size} of the {output.total} bytes of the {stream} of run {run_id}."
    facts = {"name": f"{run_id}-{stream}", "title": f"{stream} of {run_id}", "mime_type": "text/plain"}
    return {"uri": uri, "description": description, "size": output.size, **facts}


def show_output(uri: str, content: bytes) -> types.TextResourceContents | types.BlobResourceContents:
    try:
        return types.TextResourceContents(uri=uri, text=content.decode(), mime_type="text/plain")
    except UnicodeDecodeError:
        blob = base64.b64encode(content).decode("ascii")
        return types.BlobResourceContents(uri=uri, blob=blob, mime_type="application/octet-stream")


def write_json(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False)
