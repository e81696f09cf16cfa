"""The tools that run commands: in a session, or in a sandbox that is made for one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from k8e.core.contract import LiveRun
from k8e.core.model import Chunk, Language, RunResult, RunSpec
from k8e.doors.errors import invalid
from k8e.doors.http import answers
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.requests import encode_words, take_command, take_limit, take_session, take_timeout
from k8e.doors.mcp.resources import OutputRecorder
from k8e.doors.mcp.tools.figures import FigureNotices, read_figures
from k8e.doors.mcp.tools.progress import notify
from k8e.doors.mcp.tools.schemas import DEFAULT_OUTPUT
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

    live, notices = await client.use(named, start), FigureNotices()
    answer = await _stream(client, live, context, limit, notices)
    if not notices.paths:
        return answer
    figures = await read_figures(client, live.session_id, notices.paths)
    left_out = notices.count - len(figures)
    counts = {"figures": len(figures), **({"figures_left_out": left_out} if left_out else {})}
    return replace(answer, body={**answer.body, **counts}, images=figures)


async def _stream(
    client: McpClient, live: LiveRun, context: CallContext, limit: int, notices: FigureNotices | None = None
) -> ToolAnswer:
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
                if notices is not None:
                    notices.feed(chunk)
                tail = (tail + chunk.data)[-TAIL:]
                notifier.note(show_state)

            result = await stream_run(live, take)
    finally:
        if result is None:
            for stream in streams.values():
                stream.drop()
    return _show(client, result, {"stdout": streams[1], "stderr": streams[2]})


def _show(client: McpClient, result: RunResult, streams: Mapping[str, OutputRecorder]) -> ToolAnswer:
    """How the run ended comes first: a model may read no further."""
    seen = sum(min(stream.total, len(stream.take())) for stream in streams.values())
    summary = answers.show_run_summary(replace(result, truncated=result.stdout_bytes + result.stderr_bytes > seen))
    first: Json = {name: summary.pop(name) for name in ("status", "exit_code", "reason") if name in summary}
    shown = {key: value for name, stream in streams.items() for key, value in stream.show(name).items()}
    kept = {name: output for name, stream in streams.items() if (output := stream.keep()) is not None}
    links = {client.outputs.add(result.run_id, name, output): output for name, output in kept.items()}
    full = {"full_output": dict(zip(kept, links, strict=True))} if kept else {}
    return ToolAnswer({**first, **shown, **summary, **full}, links=links)


async def pip_install(client: McpClient, fields: Fields, context: CallContext) -> ToolAnswer:
    named = take_session(fields)
    packages = fields.take_texts("packages") or []
    fields.finish()

    async def install(session_id: str) -> RunResult:
        return await client.service.runs.pip_install(client.caller, session_id, packages)

    result = await client.use(named, install)
    output = OutputRecorder(DEFAULT_OUTPUT)
    output.feed(result.stdout + result.stderr)
    return _show(client, result, {"output": output})
