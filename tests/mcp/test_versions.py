"""Every version of the protocol with the official client of its time: each checks answers by the schemas of its own
version. They come from the Python index, once, to build/."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from tests.cli.machine import DEADLINE, K8E, ROOT, Machine
from tests.mcp.test_http import listening
from tests.mcp.test_tools import make_png

pytestmark = pytest.mark.timeout(900)  # the first run in a checkout downloads the clients

FOLDER = ROOT / "build" / "mcp-clients" / "python"
ENVIRONMENT = dict(os.environ)  # with this machine's own pip configuration
# The last client for which each version was the newest. The newest of them brings the packages that all need; the
# oldest ones use a part of pydantic that later releases do not have.
PYDANTIC = "2.11.7"
GENERATIONS = {
    "2024-11-05": "1.7.1",
    "2025-03-26": "1.9.4",
    "2025-06-18": "1.22.0",
    "2025-11-25": "1.30.0",
}

TALK = """
import asyncio, json, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

kind, place = sys.argv[1:]


def connect():
    if kind == "stdio":
        return stdio_client(StdioServerParameters(command=place, args=["sandbox-mcp"], env=dict(os.environ)))
    if kind == "sse":
        from mcp.client.sse import sse_client

        return sse_client(place)
    from mcp.client.streamable_http import streamablehttp_client

    return streamablehttp_client(place)


def show(result):
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)


async def main():
    async with connect() as streams, ClientSession(*streams[:2]) as session:
        started = await session.initialize()
        tools = await session.list_tools()
        cut = await session.call_tool("sandbox_run", {"code": "seq 20000; exit 3"})
        uri = json.loads(cut.content[0].text)["full_output"]["stdout"]
        rest = await session.call_tool("sandbox_read_output", {"uri": uri, "offset": 100000})
        from pydantic import AnyUrl

        whole = await session.read_resource(AnyUrl(uri))
        write = {"path": "a.png", "encoding": "base64", "content": os.environ["PICTURE"]}
        await session.call_tool("sandbox_write_file", write)
        picture = await session.call_tool("sandbox_read_file", {"path": "a.png"})
        wrong = await session.call_tool("sandbox_exec", {"session_id": "none", "command": "id"})
        answers = {"started": started, "tools": tools, "cut": cut, "rest": rest, "picture": picture, "wrong": wrong}
        shown = {name: show(result) for name, result in answers.items()}
        print(json.dumps({**shown, "whole": whole.contents[0].text}))


asyncio.run(main())
"""


def install(*words: str) -> None:
    argv = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def generations() -> Path:
    """A directory for each version of the protocol."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with open(FOLDER.parent / "python.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, made_of = FOLDER / "stamp", json.dumps([GENERATIONS, PYDANTIC, sys.version])
        if not stamp.exists() or stamp.read_text() != made_of:
            shutil.rmtree(FOLDER, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True, env=ENVIRONMENT)
            install(f"mcp=={[*GENERATIONS.values()][-1]}", f"pydantic=={PYDANTIC}")
            for version, release in GENERATIONS.items():
                install("--no-deps", "--target", str(FOLDER / version), f"mcp=={release}")
            stamp.write_text(made_of)
        (FOLDER / "talk.py").write_text(TALK)
    return FOLDER


@pytest.fixture(scope="module")
def url(machine: Machine) -> Iterator[str]:
    with listening(machine) as made:
        yield made


def talk(machine: Machine, generations: Path, version: str, *words: str) -> Any:
    picture = base64.b64encode(make_png()).decode("ascii")
    done = subprocess.run(
        [generations / "bin" / "python", generations / "talk.py", *words],
        env={**machine.env, "PYTHONPATH": str(generations / version), "PICTURE": picture},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_there_is_a_client_of_every_version() -> None:
    """Of the newest one, which has no handshake, the tests have the client everywhere."""
    assert tuple(GENERATIONS) == HANDSHAKE_PROTOCOL_VERSIONS


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("2024-11-05", "stdio"),
        ("2024-11-05", "sse"),
        ("2025-03-26", "stdio"),
        ("2025-03-26", "http"),
        ("2025-06-18", "stdio"),
        ("2025-11-25", "http"),
    ],
)
def test_a_client_understands_everything_in_its_own_version(
    machine: Machine, generations: Path, url: str, version: str, kind: str
) -> None:
    heard = talk(machine, generations, version, kind, str(K8E) if kind == "stdio" else url)
    assert heard["started"]["protocolVersion"] == version
    whole = "".join(f"{n}\n" for n in range(1, 20001))
    # The first thing that a model reads is how it ended.
    text = heard["cut"]["content"][0]["text"]
    assert text.startswith('{"status": "completed", "exit_code": 3, "stdout": "1\\n2\\n')
    run = json.loads(text)
    assert (run["truncated"], run["stdout_bytes"]) == (True, len(whole))
    assert len(text) < 24_000
    assert f"of {len(whole)} bytes are left out here]" in run["stdout"]
    assert "sandbox_read_output" in run["rest"]
    assert json.loads(heard["rest"]["content"][0]["text"])["content"] == whole[100000:]
    assert heard["whole"] == whole
    assert [block["type"] for block in heard["picture"]["content"]] == ["text", "image"]
    assert base64.b64decode(heard["picture"]["content"][1]["data"]) == make_png()
    assert heard["wrong"]["isError"] is True
    assert json.loads(heard["wrong"]["content"][0]["text"])["code"] == "session_not_found"
    structured = version >= "2025-06-18"
    assert [block["type"] for block in heard["cut"]["content"]] == (
        ["text", "resource_link"] if structured else ["text"]
    )
    assert ("structuredContent" in heard["cut"]) == structured
    for tool in heard["tools"]["tools"]:
        assert ("outputSchema" in tool, "title" in tool) == (structured, structured)
        assert ("annotations" in tool) == (version >= "2025-03-26")
