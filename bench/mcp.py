"""Measures the time from starting `k8e sandbox-mcp` to its answer to `initialize`, beside a server on the same
SDK that says hello; and one call of a tool on a connection that is open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from bench.daemon import ROOT, serving
from bench.samples import Measure, measure_pairs

HELLO = """
import asyncio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

async def list_tools(ctx, params):
    return types.ListToolsResult(tools=[types.Tool(name="hello", input_schema={"type": "object"})])

async def call_tool(ctx, params):
    return types.CallToolResult(content=[types.TextContent(text="hello")])

async def main():
    server = Server("hello", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

asyncio.run(main())
"""
INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "clientInfo": {"name": "bench", "version": "1"},
    "capabilities": {},
}


class Agent:
    """A server on pipes, one question at a time."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._count = 0

    def ask(self, method: str, params: object) -> object:
        self._count += 1
        self._write({"jsonrpc": "2.0", "id": self._count, "method": method, "params": params})
        answer = json.loads(self._pipe(self._process.stdout).readline())
        return answer["result"]

    def start(self) -> None:
        self.ask("initialize", INITIALIZE)
        self._write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def end(self) -> None:
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        self._process.wait()

    def _write(self, message: object) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def initialize(argv: Sequence[str], env: Mapping[str, str]) -> float:
    started = time.perf_counter()
    agent = Agent(argv, env)
    agent.start()
    taken = (time.perf_counter() - started) * 1000
    agent.end()
    return taken


async def measure_mcp(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 10 if quick else 30
    ours = (str(ROOT / ".venv" / "bin" / "k8e"), "sandbox-mcp")
    hello = (sys.executable, "-c", HELLO)
    async with serving(scratch / "mcp") as daemon:
        env = daemon.environment
        await asyncio.to_thread(initialize, ours, env)  # the daemon has loaded the SDK after this
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(count):
            for argv, samples in zip((ours, hello), taken, strict=True):
                samples.append(await asyncio.to_thread(initialize, argv, env))
        name = "hello world on the same SDK"
        yield Measure("k8e sandbox-mcp: started and initialized", "ms", tuple(taken[0]), name, tuple(taken[1]))
        for runtime in await daemon.runtimes():
            yield await measure_call(ours, hello, env, runtime, count * 5)


async def measure_call(
    ours: Sequence[str], hello: Sequence[str], env: Mapping[str, str], runtime: str, count: int
) -> Measure:
    agent, other = Agent(ours, env), Agent(hello, env)
    try:
        for each in (agent, other):
            await asyncio.to_thread(each.start)
        wish = {"name": "sandbox_create_session", "arguments": {"runtime_class": runtime, "session_id": "bench"}}
        await asyncio.to_thread(agent.ask, "tools/call", wish)
        run = {"name": "sandbox_exec", "arguments": {"session_id": "bench", "command": ["/usr/bin/true"]}}
        samples = await measure_pairs(
            count,
            lambda: asyncio.to_thread(agent.ask, "tools/call", run),
            lambda: asyncio.to_thread(other.ask, "tools/call", {"name": "hello", "arguments": {}}),
        )
    finally:
        await asyncio.to_thread(agent.end)
        await asyncio.to_thread(other.end)
    return Measure(f"{runtime}: sandbox_exec true over stdio", "ms", samples[0], "a tool that says hello", samples[1])
