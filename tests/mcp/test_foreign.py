"""Clients in another language, from the people who write the protocol: the TypeScript client, the Inspector's command
line, and the conformance suite. They come from the npm registry, which takes its time: `make soak` runs this."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.machine import DEADLINE, K8E, ROOT, Machine
from tests.mcp.test_http import listening

pytestmark = pytest.mark.skipif("K8E_SOAK" not in os.environ, reason="K8E_SOAK is not set")

FOLDER = ROOT / "build" / "mcp-clients"
PACKAGES = (
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/inspector@0.15.0",
    "@modelcontextprotocol/conformance@0.1.16",
)
ENVIRONMENT = dict(os.environ)  # with this machine's own npm configuration

TALK = """
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { SSEClientTransport } from "@modelcontextprotocol/sdk/client/sse.js";
const [kind, place] = process.argv.slice(2);
const stdio = { command: place, args: ["sandbox-mcp"], env: process.env };
const transport = kind === "stdio" ? new StdioClientTransport(stdio)
  : kind === "http" ? new StreamableHTTPClientTransport(new URL(place)) : new SSEClientTransport(new URL(place));
const client = new Client({ name: "test", version: "1" });
await client.connect(transport);
const { tools } = await client.listTools();
const run = await client.callTool({ name: "sandbox_run", arguments: { code: "console.log(6*7)", language: "node" } });
const wrong = await client.callTool({ name: "sandbox_exec", arguments: { session_id: "none", command: "id" } });
const problem = JSON.parse(wrong.content[0].text);
console.log(JSON.stringify({ tools: tools.length, run: run.structuredContent, wrong: problem }));
if (transport.terminateSession) await transport.terminateSession();
await client.close();
"""

# All others want tools, prompts and resources of the suite's own ("test_simple_text", "test://static-text"), which only
# a server written for it has, or logging, completion, prompts and subscriptions, which this one does not offer.
SCENARIOS = (
    "server-initialize",
    "ping",
    "tools-list",
    "resources-list",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
)


@pytest.fixture(scope="module")
def modules() -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = FOLDER / "stamp"
        if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
            (FOLDER / "package.json").write_text('{"private": true, "type": "module"}')
            argv = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
            done = subprocess.run(argv, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            stamp.write_text("\n".join(PACKAGES))
        (FOLDER / "talk.mjs").write_text(TALK)
    return FOLDER


@pytest.fixture(scope="module")
def url(machine: Machine) -> Iterator[str]:
    with listening(machine) as made:
        yield made


def run_node(machine: Machine, modules: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", *words],
        cwd=modules,
        env={**ENVIRONMENT, **machine.env, "PATH": f"{K8E.parent}:{ENVIRONMENT['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def read_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["stdio", "http", "sse"])
def test_the_typescript_client(machine: Machine, modules: Path, url: str, kind: str) -> None:
    place = str(K8E) if kind == "stdio" else url
    heard = read_json(run_node(machine, modules, "talk.mjs", kind, place))
    assert heard["tools"] > 10
    assert heard["run"]["stdout"] == "42\n"
    assert heard["wrong"]["code"] == "session_not_found"


def test_the_inspector(machine: Machine, modules: Path) -> None:
    inspector = "node_modules/@modelcontextprotocol/inspector/cli/build/cli.js"
    words = ("--method", "tools/call", "--tool-name", "sandbox_run", "--tool-arg", "code=echo hi")
    answer = read_json(run_node(machine, modules, inspector, "--cli", str(K8E), "sandbox-mcp", *words))
    assert answer["structuredContent"]["stdout"] == "hi\n"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_conformance_suite(machine: Machine, modules: Path, url: str, scenario: str) -> None:
    version = run_node(machine, modules, "-p", "process.versions.node.split('.')[0]").stdout
    if int(version) < 22:
        pytest.skip("the suite needs Node 22")
    suite = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    done = run_node(machine, modules, suite, "server", "--url", url, "--scenario", scenario)
    assert done.returncode == 0, done.stdout[-2000:]
