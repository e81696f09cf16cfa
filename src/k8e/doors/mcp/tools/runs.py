"""The tools that run commands: in a session, or in a sandbox that is made for one command."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.contract import LiveRun
from k8e.core.model import Chunk, Language, RunResult, RunSpec
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.requests import encode_words, take_command, take_limit, take_session, take_timeout
from k8e.doors.mcp.resources import OutputRecorder
from k8e.doors.mcp.tools.progress import notify
from k8e.doors.mcp.tools.tool import CallContext, ToolAnswer
from k8e.doors.run_stream import stream_run

TAIL: Final = 2000  # bytes of the latest output that a notification carries
INTERVAL: Final = 0.25  # seconds between two notifications


async def run(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    if "command" in fields:
        return await run_command(client, fields, context)
    if "code" not in fields:
        raise invalid("code", "neither code nor command is given", hint="code is a script, command is a list of words")
    named = fields.take_text("session_id")
    limit = take_limit(fields)
    spec = RunSpec(
        "",
        code=fields.take_text("code"),
        language=fields.take_choice("language", Language) or Language.BASH,
        timeout=take_timeout(fields),
        workdir=fields.take_text("cwd"),
        env=fields.take_mapping("env"),
    )
    _refuse_policy(fields, "code runs in a session")
    fields.finish()
    return await run_in_session(client, spec, named, context, limit)


async def run_command(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    """Makes a sandbox for the command, which ends with it."""
    for name in ("code", "language"):
        if name in fields:
            raise invalid(name, f"{name} is given together with command", hint="give one of them")
    words, spec = take_command(fields)
    limit = take_limit(fields)
    if named := fields.take_text("session_id"):
        _refuse_policy(fields, "session_id names a session that is there")
        fields.finish()
        return await run_in_session(client, spec, named, context, limit)
    resolved = await context.specs.resolve(client, fields, context.send_progress, words)
    spec = replace(spec, entrypoint=resolved.asked_image)
    live = await client.service.runs.start_once(client.caller, resolved.spec, spec)
    answer = await _stream(client, live, context, limit)
    notes = await context.specs.review(resolved)
    return replace(answer, body={**answer.body, "notes": list(notes)}) if notes else answer


def _refuse_policy(fields: Fields, why: str) -> None:
    for name in ("profile", "compatibility_mode", "network", "image"):
        if name in fields:
            raise invalid(name, f"{name} is for a temporary sandbox, and {why}", hint="give command, and no session_id")


async def execute(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = take_session(fields)
    words = fields.take_words("command")
    limit = take_limit(fields)
    spec = RunSpec(
        "",
        code=words if isinstance(words, str) else "",
        argv=() if isinstance(words, str) else encode_words(words),
        timeout=fields.take_number("timeout", RunSpec("").timeout),
        workdir=fields.take_text("workdir"),
        env=fields.take_mapping("env"),
    )
    fields.finish()
    return await run_in_session(client, spec, named, context, limit)


async def run_in_session(client: McpClient, spec: RunSpec, named: str, context: CallContext, limit: int) -> ToolAnswer:
    async def start(session_id: str) -> LiveRun:
        return await client.service.runs.start(client.caller, replace(spec, session_id=session_id))

    return await _stream(client, await client.use(named, start), context, limit)


async def _stream(client: McpClient, live: LiveRun, context: CallContext, limit: int) -> ToolAnswer:
    """Sends the latest output as notifications while the command runs. The answer has the beginning and the end of both
    streams, and links to resources with all of what it leaves out."""
    streams = {1: OutputRecorder(limit), 2: OutputRecorder(limit)}
    tail = b""

    def show_state() -> tuple[float, str]:
        return sum(stream.total for stream in streams.values()), tail.decode(errors="replace")

    result: RunResult | None = None
    try:
        async with notify(context.send_progress, INTERVAL) as notifier:

            async def take(chunk: Chunk) -> None:
                nonlocal tail
                streams[chunk.stream].feed(chunk.data)
                tail = (tail + chunk.data)[-TAIL:]
                notifier.note(show_state)

            result = await stream_run(live, take)
    finally:
        if result is None or client.outputs is None:
            for stream in streams.values():
                stream.drop()
    stdout, stderr = (stream.take() for stream in streams.values())
    truncated = result.stdout_bytes > len(stdout) or result.stderr_bytes > len(stderr)
    body = answers.show_run(replace(result, stdout=stdout, stderr=stderr, truncated=truncated))
    if client.outputs is None:
        return ToolAnswer(body)
    named = zip(("stdout", "stderr"), streams.values(), strict=True)
    kept = {name: output for name, stream in named if (output := stream.keep()) is not None}
    links = {client.outputs.add(result.run_id, name, output): output for name, output in kept.items()}
    return ToolAnswer({**body, "full_output": dict(zip(kept, links, strict=True))} if kept else body, links=links)


async def pip_install(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = take_session(fields)
    packages = fields.take_texts("packages") or []
    fields.finish()

    async def install(session_id: str) -> RunResult:
        return await client.service.runs.pip_install(client.caller, session_id, packages)

    result = await client.use(named, install)
    output = (result.stdout + result.stderr).decode(errors="replace")
    return ToolAnswer({"output": output, **answers.show_run_summary(result)})
