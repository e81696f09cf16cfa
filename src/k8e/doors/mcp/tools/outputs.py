"""The tool that reads the parts of an output that a result has left out."""

from __future__ import annotations

from k8e.core.errors import Fault, Kind
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.requests import take_limit
from k8e.doors.mcp.tools.tool import CallContext, ToolAnswer


async def read_output(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    uri, offset, length = fields.take_text("uri"), fields.take_count("offset", 0), take_limit(fields, "length")
    fields.finish()
    if offset < 0:
        raise invalid("offset", "offset is less than 0", hint="It is the first byte to read.")
    output = client.outputs.find(uri)
    if output is None:
        error = "there is no such output: they are kept as long as their connection, the latest of them"
        hint = "Use an address of full_output. Or run the command again, with its output in a file of the session."
        raise Fault(Kind.NOT_FOUND, "output_not_found", error, hint=hint, field="uri")
    if offset > output.size:
        hint = f"{output.size} of its {output.total} bytes are kept: begin before their end."
        raise invalid("offset", f"there is no byte {offset}", hint=hint)
    content = output.read(offset, length)
    end = offset + len(content)
    facts = {"uri": uri, "offset": offset, "bytes": len(content), "total": output.total, "more": end < output.size}
    return ToolAnswer({**facts, **answers.text_of("content", content)})
