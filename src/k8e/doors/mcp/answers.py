"""Turns the answers of tools, and the catalogue, into the types of the SDK."""

from __future__ import annotations

import base64
import json

import mcp_types as types

from k8e.doors.http.answers import Json
from k8e.doors.mcp.resources import OutputResource
from k8e.doors.mcp.tools.schemas import ToolText
from k8e.doors.mcp.tools.tool import ToolAnswer


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


def show_answer(answer: ToolAnswer) -> types.CallToolResult:
    content: list[types.ContentBlock] = [types.TextContent(text=write_json(answer.body))]
    if answer.image is not None:
        data = base64.b64encode(answer.image.data).decode("ascii")
        content.append(types.ImageContent(data=data, mime_type=answer.image.mime_type))
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
