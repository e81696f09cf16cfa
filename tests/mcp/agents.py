"""Clients for the tests: the official one, and raw lines for what it would not send."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, TextContent

from tests.cli.machine import K8E, Machine

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "clientInfo": {"name": "test", "version": "1.0"},
        "capabilities": {},
    },
}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}


@contextlib.asynccontextmanager
async def stdio_agent(machine: Machine, *words: str, mode: str = "legacy") -> AsyncIterator[Client]:
    folder = machine.home / "project"
    folder.mkdir(exist_ok=True)
    server = StdioServerParameters(command=str(K8E), args=["sandbox-mcp", *words], env=machine.env, cwd=folder)
    async with Client(server, mode=mode) as client:
        yield client


def read(result: CallToolResult) -> Any:
    """The JSON object, which is the same as text and as structured content."""
    assert not result.is_error, result.content
    assert isinstance(result.content[0], TextContent)
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


def read_problem(result: CallToolResult) -> Any:
    assert result.is_error, result.structured_content
    assert result.structured_content is None
    assert isinstance(result.content[0], TextContent)
    problem = json.loads(result.content[0].text)
    assert problem["code"]
    assert problem["error"]
    return problem


async def call(client: Client, name: str, /, **arguments: Any) -> Any:
    return read(await client.call_tool(name, arguments))


async def fail(client: Client, name: str, /, **arguments: Any) -> Any:
    return read_problem(await client.call_tool(name, arguments))


class Pipes:
    """`k8e sandbox-mcp` with raw lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._count = 1

    def write(self, message: object) -> None:
        assert self.process.stdin is not None
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the connection has ended"
        return json.loads(line)

    def read_answer(self, number: int) -> Any:
        """Skips notifications."""
        while "id" not in (message := self.read()):
            pass
        assert message["id"] == number
        return message["result"]["structuredContent"]

    def start(self, version: str = "2025-11-25") -> Any:
        self.write(INITIALIZE | {"params": {**INITIALIZE["params"], "protocolVersion": version}})  # type: ignore[dict-item]
        answer = self.read()
        self.write(INITIALIZED)
        return answer

    def begin_call(self, name: str, /, **arguments: Any) -> int:
        self._count += 1
        params = {"name": name, "arguments": arguments, "_meta": {"progressToken": self._count}}
        self.write({"jsonrpc": "2.0", "id": self._count, "method": "tools/call", "params": params})
        return self._count


@contextlib.contextmanager
def pipes(machine: Machine, *words: str) -> Iterator[Pipes]:
    with machine.start("sandbox-mcp", *words, stderr=None) as process:
        yield Pipes(process)
