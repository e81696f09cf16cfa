"""Every tool, with the arguments that it is meant for and with the mistakes that models make."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitResult, ImageContent, ResourceLink, TextContent, TextResourceContents

from tests.cli.machine import K8E, Machine, wait_until
from tests.gateway.house import open_house
from tests.mcp.agents import call, fail, pipes, read, stdio_agent

# What contracts.md §4 lists and this version has.
NAMES = {
    "sandbox_run",
    "sandbox_status",
    "sandbox_create_session",
    "sandbox_destroy_session",
    "sandbox_exec",
    "sandbox_exec_stream",
    "sandbox_read_output",
    "sandbox_write_file",
    "sandbox_read_file",
    "sandbox_list_files",
    "sandbox_pip_install",
    "sandbox_run_subagent",
    "sandbox_confirm_action",
    "sandbox_list",
    "sandbox_remove",
    "sandbox_file_write",
    "sandbox_file_read",
    "sandbox_create",
    "sandbox_start",
    "sandbox_stop",
}


@pytest.fixture(scope="module")
async def agent(machine: Machine) -> AsyncIterator[Client]:
    async with stdio_agent(machine) as client:
        yield client


@pytest.fixture(scope="module")
async def session(agent: Client) -> str:
    return str((await call(agent, "sandbox_create_session", runtime_class="native"))["session_id"])


def make_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


async def test_every_tool_is_listed_with_closed_schemas(agent: Client) -> None:
    tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
    assert set(tools) == NAMES
    for tool in tools.values():
        assert tool.title
        assert tool.description
        assert tool.input_schema["additionalProperties"] is False
        assert all(schema.get("description") for schema in tool.input_schema["properties"].values())
        assert tool.output_schema is not None
        assert tool.output_schema["required"]
        assert tool.annotations is not None
        assert None not in (
            tool.annotations.read_only_hint,
            tool.annotations.destructive_hint,
            tool.annotations.idempotent_hint,
            tool.annotations.open_world_hint,
        )
    assert tools["sandbox_read_file"].annotations.read_only_hint is True  # type: ignore[union-attr]
    assert tools["sandbox_destroy_session"].annotations.destructive_hint is True  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(NAMES))
async def test_an_unknown_parameter_is_a_mistake_that_is_explained(agent: Client, name: str) -> None:
    problem = await fail(agent, name, colour="blue")
    assert (problem["code"], problem["field"]) == ("invalid_argument", "colour")
    assert name in problem["hint"]


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("sandbox_run", {}, "code"),
        ("sandbox_run", {"code": 1}, "code"),
        ("sandbox_run", {"code": "id", "command": ["id"]}, "code"),
        ("sandbox_run", {"code": "id", "language": "cobol"}, "language"),
        ("sandbox_run", {"code": "id", "timeout": "soon"}, "timeout"),
        ("sandbox_run", {"code": "id", "timeout": 0}, "timeout"),
        ("sandbox_run", {"code": "id", "timeout": 1, "timeout_ms": 1}, "timeout_ms"),
        ("sandbox_run", {"code": "id", "network": False}, "network"),
        ("sandbox_run", {"code": "id", "env": {"A": 1}}, "env"),
        ("sandbox_run", {"code": "id", "max_output": 1}, "max_output"),
        ("sandbox_run", {"command": []}, "command"),
        ("sandbox_run", {"command": "id"}, "command"),
        ("sandbox_run", {"command": ["id"], "profile": "cobol"}, "profile"),
        ("sandbox_run", {"command": ["id"], "image": "-v/:/host"}, "image"),
        ("sandbox_run", {"command": ["id"], "env": {"--privileged": "1"}}, "env"),
        ("sandbox_run", {"command": ["id"], "cwd": "/tmp\0"}, "cwd"),
        ("sandbox_create", {"name": "../../x"}, "name"),
        ("sandbox_create", {"name": "--privileged"}, "name"),
        ("sandbox_create", {"name": "x" * 64}, "name"),
        ("sandbox_create", {"name": "x", "image": "-v/:/host"}, "image"),
        ("sandbox_create", {"name": "x", "profile": ["restrictive"]}, "profile"),
        ("sandbox_start", {"name": "../../x"}, "name"),
        ("sandbox_stop", {}, "name"),
        ("sandbox_run", {"command": ["id"], "compatibility_mode": "cobol"}, "compatibility_mode"),
        ("sandbox_exec", {}, "command"),
        ("sandbox_exec", {"command": 1}, "command"),
        ("sandbox_exec", {"session_id": "a", "name": "b", "command": "id"}, "name"),
        ("sandbox_exec", {"session_id": "no good", "command": "id"}, "session_id"),
        ("sandbox_read_output", {}, "uri"),
        ("sandbox_read_output", {"uri": "k8e://runs/a/stdout", "length": 1}, "length"),
        ("sandbox_read_output", {"uri": "k8e://runs/a/stdout", "offset": -1}, "offset"),
        ("sandbox_write_file", {"path": "a"}, "content"),
        ("sandbox_write_file", {"path": "", "content": ""}, "path"),
        ("sandbox_write_file", {"path": "a", "content": "", "mode": "x"}, "mode"),
        ("sandbox_write_file", {"path": "a", "content": "!", "encoding": "base64"}, "content"),
        ("sandbox_read_file", {}, "path"),
        ("sandbox_file_read", {"path": "a", "encoding": "latin"}, "encoding"),
        ("sandbox_list_files", {"since": "yesterday"}, "since"),
        ("sandbox_pip_install", {"packages": []}, "packages"),
        ("sandbox_pip_install", {"packages": ["--user"]}, "packages[0]"),
        ("sandbox_create_session", {"runtime_class": "docker"}, "runtime_class"),
        ("sandbox_create_session", {"allowed_hosts": ["http://x/"]}, "allowed_hosts"),
        ("sandbox_create_session", {"session_id": "a b"}, "session_id"),
        ("sandbox_run_subagent", {"parent_session_id": "no good"}, "parent_session_id"),
        ("sandbox_run_subagent", {"agent_type": "no good"}, "agent_type"),
        ("sandbox_run_subagent", {"workspace_path": "/etc"}, "workspace_path"),
        ("sandbox_confirm_action", {}, "action"),
        ("sandbox_confirm_action", {"action": "a", "approval_id": "b"}, "action"),
        ("sandbox_destroy_session", {}, "session_id"),
        ("sandbox_remove", {}, "name"),
    ],
)
async def test_a_mistake_names_its_field(agent: Client, name: str, arguments: dict[str, Any], field: str) -> None:
    problem = await fail(agent, name, **arguments)
    assert problem["code"] == "invalid_argument"
    assert problem["field"] == field


async def test_an_unknown_tool_is_an_error_of_the_protocol(agent: Client) -> None:
    with pytest.raises(MCPError, match="Unknown tool"):
        await agent.call_tool("sandbox_nothing", {})


async def test_run_makes_one_session_for_many_calls_at_once(agent: Client) -> None:
    runs = await asyncio.gather(*(call(agent, "sandbox_run", code=f"echo {n}; exit {n}") for n in range(6)))
    assert [(run["stdout"], run["exit_code"]) for run in runs] == [(f"{n}\n", n) for n in range(6)]
    assert len({run["session_id"] for run in runs}) == 1
    status = await call(agent, "sandbox_status")
    assert (status["available"], status["session_id"]) == (True, runs[0]["session_id"])


async def test_sub_agents_share_the_workspace_of_the_session_that_is_meant(agent: Client, session: str) -> None:
    mine = (await call(agent, "sandbox_run", code="echo mine > shared"))["session_id"]
    child = await call(agent, "sandbox_run_subagent")
    assert child["parent_session_id"] == mine
    other = await call(
        agent, "sandbox_run_subagent", parent_session_id=session, agent_type="reviewer", workspace_path="part"
    )
    assert other["parent_session_id"] == session
    run = await call(agent, "sandbox_exec", session_id=child["session_id"], command="cat shared; echo back > answer")
    assert run["stdout"] == "mine\n"
    assert (await call(agent, "sandbox_run", code="cat answer"))["stdout"] == "back\n"
    run = await call(agent, "sandbox_exec", session_id=other["session_id"], command="pwd; ls /workspace/shared")
    assert (run["stdout"], run["exit_code"]) == ("/workspace/part\n", 2)
    refused = await fail(agent, "sandbox_run_subagent", parent_session_id=child["session_id"])
    assert refused["code"] == "child_of_child"
    listed = {each["session_id"]: each for each in (await call(agent, "sandbox_list"))["sessions"]}
    assert child["session_id"] in listed[mine]["children"]
    for made in (child, other):
        await call(agent, "sandbox_destroy_session", session_id=made["session_id"])


async def test_calls_run_side_by_side(agent: Client, session: str) -> None:
    """Each command waits for the other."""
    await call(agent, "sandbox_exec", session_id=session, command="mkfifo a b")
    both = await asyncio.gather(
        call(agent, "sandbox_exec", session_id=session, command="echo one > a; cat b"),
        call(agent, "sandbox_exec", session_id=session, command="cat a; echo two > b"),
    )
    assert [run["stdout"] for run in both] == ["two\n", "one\n"]


@pytest.mark.parametrize(
    ("language", "code"),
    [("bash", "echo $((6*7))"), ("python", "print(6*7)"), ("node", "console.log(6*7)")],
)
async def test_run_speaks_languages(agent: Client, session: str, language: str, code: str) -> None:
    run = await call(agent, "sandbox_run", session_id=session, language=language, code=code)
    assert (run["stdout"], run["exit_code"], run["status"]) == ("42\n", 0, "completed")


async def test_run_takes_its_directory_and_variables(agent: Client, session: str) -> None:
    run = await call(agent, "sandbox_run", session_id=session, code='pwd; echo "$A"', cwd="/tmp", env={"A": "b c"})
    assert run["stdout"] == "/tmp\nb c\n"


async def test_a_timeout_is_a_result(agent: Client, session: str) -> None:
    for wish in ({"timeout": 0.3}, {"timeout_ms": 300}):
        run = await call(agent, "sandbox_run", session_id=session, code="sleep 100", **wish)
        assert (run["exit_code"], run["status"]) == (124, "timed_out")


async def test_bytes_that_are_no_text_come_exactly(agent: Client, session: str) -> None:
    run = await call(agent, "sandbox_exec", session_id=session, command=["printf", "\\377\\033[31m\\000"])
    assert base64.b64decode(run["stdout_base64"]) == b"\xff\x1b[31m\0"


async def test_the_other_spelling_runs_in_a_temporary_sandbox(agent: Client, machine: Machine) -> None:
    before = set(machine.live_sessions())
    run = await call(
        agent,
        "sandbox_run",
        command=["python3", "-c", "print('hello')"],
        compatibility_mode="claude",
        profile="moderate",
        image="host",
        timeout_ms=60000,
    )
    assert (run["stdout"], run["exit_code"]) == ("hello\n", 0)
    assert run["session_id"] not in before
    listed = (await call(agent, "sandbox_list"))["sessions"]
    assert run["session_id"] not in {each["session_id"] for each in listed}


async def test_a_mode_adds_its_hosts_and_no_network_is_none(agent: Client) -> None:
    script = "import socket\ntry: socket.getaddrinfo('api.anthropic.com', 443)\nexcept OSError: pass"
    isolated = await call(
        agent, "sandbox_run", command=["python3", "-c", script], network=False, compatibility_mode="claude"
    )
    assert [each["host"] for each in isolated["denied"]] == ["api.anthropic.com"]
    assert isolated["denied"][0]["hint"]
    allowed = await call(agent, "sandbox_run", command=["python3", "-c", script], compatibility_mode="claude")
    assert "api.anthropic.com" not in [
        each["host"] for each in allowed["denied"] if each["reason"] == isolated["denied"][0]["reason"]
    ]


async def test_what_the_network_refused_comes_with_what_to_ask_for(agent: Client, session: str) -> None:
    script = "import socket\ntry: socket.getaddrinfo('refused.example', 443)\nexcept OSError: pass"
    run = await call(agent, "sandbox_run", session_id=session, language="python", code=script)
    [denial] = run["denied"]
    assert denial["host"] == "refused.example"
    assert denial["hint"]


async def test_files_go_in_and_out(agent: Client, session: str) -> None:
    for write, read_tool, key in (
        ("sandbox_write_file", "sandbox_read_file", "session_id"),
        ("sandbox_file_write", "sandbox_file_read", "name"),
    ):
        content = "zeile 1\nZeile zwei: äöü\x1b[0m\n"
        written = await call(agent, write, **{key: session}, path="d/e/f.txt", content=content)
        assert written == {"ok": True, "path": "d/e/f.txt", "bytes": len(content.encode()), "session_id": session}
        found = await call(agent, read_tool, **{key: session}, path="/workspace/d/e/f.txt")
        assert (found["content"], found["encoding"]) == (content, "utf-8")
        data = base64.b64encode(b"\xff\0").decode()
        await call(agent, write, **{key: session}, path="data", content=data, encoding="base64")
        found = await call(agent, read_tool, **{key: session}, path="data")
        assert (found["content"], found["encoding"], found["bytes"]) == (data, "base64", 2)
    await call(agent, "sandbox_write_file", session_id=session, path="d/e/f.txt", content="more", mode="a")
    found = await call(agent, "sandbox_file_read", name=session, path="d/e/f.txt", encoding="base64")
    assert base64.b64decode(found["content"]).endswith(b"\nmore")


async def test_files_are_listed_since(agent: Client, session: str) -> None:
    await call(agent, "sandbox_write_file", session_id=session, path="listed/old", content="")
    old = await call(agent, "sandbox_exec", session_id=session, command="touch -d @1000 listed/old; touch listed/new")
    assert old["exit_code"] == 0
    every = await call(agent, "sandbox_list_files", session_id=session, path="listed")
    assert sorted(each["path"] for each in every["files"]) == ["/workspace/listed/new", "/workspace/listed/old"]
    new = await call(agent, "sandbox_list_files", session_id=session, path="listed", since=time.time() - 3600)
    assert [each["path"] for each in new["files"]] == ["/workspace/listed/new"]


async def test_a_missing_file_is_a_problem_with_a_code(agent: Client, session: str) -> None:
    assert (await fail(agent, "sandbox_read_file", session_id=session, path="nowhere"))["code"] == "file_not_found"


async def test_a_file_that_is_too_large_for_an_answer_is_said_to_be(agent: Client, session: str) -> None:
    await call(agent, "sandbox_exec", session_id=session, command="truncate -s 9M large")
    assert (await fail(agent, "sandbox_read_file", session_id=session, path="large"))["code"] == "file_too_large"


async def test_a_picture_comes_as_one(agent: Client, session: str) -> None:
    """A program wrote it, under any name."""
    png = make_png()
    script = f"open('plot.txt', 'wb').write(bytes.fromhex('{png.hex()}'))"
    await call(agent, "sandbox_run", session_id=session, language="python", code=script)
    result = await agent.call_tool("sandbox_read_file", {"session_id": session, "path": "plot.txt"})
    facts = read(result)
    assert (facts["mime_type"], facts["bytes"]) == ("image/png", len(png))
    assert "content" not in facts
    [image] = [block for block in result.content if isinstance(block, ImageContent)]
    assert (image.mime_type, base64.b64decode(image.data)) == ("image/png", png)


async def test_output_over_the_cap_is_a_resource(agent: Client, session: str) -> None:
    result = await agent.call_tool(
        "sandbox_exec", {"session_id": session, "command": "seq 1 400000; echo e >&2", "max_output": 100}
    )
    run = read(result)
    whole = "".join(f"{n}\n" for n in range(1, 400001))
    assert run["truncated"] is True
    assert run["stdout"] == f"{whole[:50]}\n[{len(whole) - 100} of {len(whole)} bytes are left out here]\n{whole[-50:]}"
    assert run["stdout_bytes"] == len(whole)
    assert run["stderr"] == "e\n"
    [link] = [block for block in result.content if isinstance(block, ResourceLink)]
    assert run["full_output"] == {"stdout": link.uri}
    assert link.size == len(whole)
    [content] = (await agent.read_resource(link.uri)).contents
    assert isinstance(content, TextResourceContents)
    assert content.text == whole
    assert link.uri in [resource.uri for resource in (await agent.list_resources()).resources]
    with pytest.raises(MCPError, match="not found"):
        await agent.read_resource("k8e://runs/none/stdout")


async def test_resources_are_their_connection_s_own(agent: Client, session: str, machine: Machine) -> None:
    run = await call(agent, "sandbox_exec", session_id=session, command="seq 1000", max_output=10)
    async with stdio_agent(machine) as other:
        assert (await other.list_resources()).resources == []
        with pytest.raises(MCPError, match="not found"):
            await other.read_resource(run["full_output"]["stdout"])


async def test_progress_carries_the_latest_output(agent: Client, session: str) -> None:
    heard: list[tuple[float, str | None]] = []
    more = asyncio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))
        more.set()

    command = "echo first; until [ -e go ]; do sleep 0.05; done; echo second; until [ -e on ]; do sleep 0.05; done"
    arguments = {"session_id": session, "command": command, "timeout": 60}
    running = asyncio.create_task(agent.call_tool("sandbox_exec_stream", arguments, progress_callback=hear))
    await more.wait()
    assert heard[-1] == (6.0, "first\n")
    more.clear()
    await call(agent, "sandbox_write_file", session_id=session, path="go", content="")
    await more.wait()
    assert heard[-1] == (13.0, "first\nsecond\n")
    await call(agent, "sandbox_write_file", session_id=session, path="on", content="")
    assert read(await running)["stdout"] == "first\nsecond\n"


def test_cancelling_ends_the_tree_and_nothing_is_answered(machine: Machine) -> None:
    with pipes(machine) as agent:
        agent.start()
        where = agent.read_answer(agent.begin_call("sandbox_create_session", runtime_class="native"))["session_id"]
        script = "(sleep 654 & sleep 655) & echo started; wait"
        running = agent.begin_call("sandbox_exec", session_id=where, command=script, timeout=1000)
        assert agent.read()["params"]["message"] == "started\n"
        agent.write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": running}})

        def none_left() -> bool:
            look = agent.begin_call("sandbox_exec", session_id=where, command="pgrep -x sleep || echo none")
            return bool(agent.read_answer(look)["stdout"] == "none\n")

        wait_until(none_left)


async def test_sessions_are_made_listed_and_destroyed(agent: Client) -> None:
    made = await call(
        agent, "sandbox_create_session", session_id="s-1", runtime_class="native", allowed_hosts=["example.com"]
    )
    assert (made["session_id"], made["runtime"]) == ("s-1", "native")
    assert made["policy"]["allowed_hosts"] == ["example.com"]
    assert (await fail(agent, "sandbox_create_session", session_id="s-1"))["code"] == "session_exists"
    assert "s-1" in [each["session_id"] for each in (await call(agent, "sandbox_list"))["sessions"]]
    assert await call(agent, "sandbox_destroy_session", session_id="s-1") == {"ok": True}
    problem = await fail(agent, "sandbox_exec", session_id="s-1", command="id")
    assert problem["code"] == "session_not_found"
    assert problem["hint"]
    await call(agent, "sandbox_create_session", session_id="s-2", runtime_class="native")
    assert await call(agent, "sandbox_remove", name="s-2") == {"ok": True}


async def test_a_default_session_that_was_destroyed_is_replaced(agent: Client, machine: Machine) -> None:
    first = await call(agent, "sandbox_run", code="echo kept > note")
    await call(agent, "sandbox_destroy_session", session_id=first["session_id"])
    assert (await call(agent, "sandbox_status"))["session_id"] is None
    second = await call(agent, "sandbox_run", code="cat note")
    assert second["session_id"] != first["session_id"]
    assert second["exit_code"] == 1
    machine.k8e("sandbox", "destroy", second["session_id"])  # behind its back
    third = await call(agent, "sandbox_run", code="cat note || echo new")
    assert third["stdout"] == "new\n"


async def test_a_question_without_a_dialogue_is_pending_and_an_agent_cannot_answer_it(
    agent: Client, session: str, machine: Machine
) -> None:
    asked = await call(agent, "sandbox_confirm_action", session_id=session, action="drop the table")
    assert (asked["approved"], asked["status"]) == (False, "pending")
    assert asked["approval_id"] in asked["hint"]
    # The agent's own shell belongs to the agent.
    refused = machine.k8e("sandbox", "approve", asked["approval_id"])
    assert refused.code == 1
    again = await call(agent, "sandbox_confirm_action", approval_id=asked["approval_id"], timeout=0)
    assert (again["approved"], again["status"]) == (False, "pending")
    assert (await fail(agent, "sandbox_confirm_action", approval_id="appr-none"))["code"] == "approval_not_found"


@pytest.fixture(scope="module")
def obliging() -> Iterator[Machine]:
    """A machine on which a user may answer approvals that the user's own programs ask for."""
    with open_house("[approvals]\nsame_user = true\n") as house:
        yield house.machine


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_no_dialogue_is_shown_where_what_is_clicked_does_not_count(machine: Machine, mode: str) -> None:
    """An agent's shell can speak this protocol too, and answer its own dialogue."""

    async def approve(context: object, params: Any) -> ElicitResult:
        raise AssertionError("no person is to be asked")

    server = StdioServerParameters(command=str(K8E), args=["sandbox-mcp"], env=machine.env)
    async with Client(server, mode=mode, elicitation_callback=approve) as agent:
        made = await call(agent, "sandbox_create_session", runtime_class="native")
        asked = await call(agent, "sandbox_confirm_action", session_id=made["session_id"], action="drop the table")
    assert (asked["status"], asked["approved"]) == ("pending", False)
    assert f"k8e sandbox approve --key {asked['approval_id']}" in asked["hint"]


@pytest.mark.parametrize(
    ("action", "ticked", "status"),
    [
        ("accept", True, "approved"),
        ("accept", False, "rejected"),
        ("decline", None, "rejected"),
        ("cancel", None, "pending"),
    ],
)
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_dialogue_is_shown_where_the_client_has_one_and_it_counts(
    obliging: Machine, mode: str, action: Any, ticked: bool | None, status: str
) -> None:
    shown: list[str] = []

    async def answer(context: object, params: Any) -> ElicitResult:
        shown.append(params.message)
        return ElicitResult(action=action, content=None if ticked is None else {"approve": ticked})

    server = StdioServerParameters(command=str(K8E), args=["sandbox-mcp"], env=obliging.env)
    async with Client(server, mode=mode, elicitation_callback=answer) as agent:
        made = await call(agent, "sandbox_create_session")
        asked = await call(
            agent, "sandbox_confirm_action", session_id=made["session_id"], action="drop \x1b[2Jthe table"
        )
        pending = obliging.k8e("sandbox", "approvals", "--all").json["approvals"]
    assert len([one for one in pending if one["session_id"] == made["session_id"]]) == 1
    assert (asked["status"], asked["approved"]) == (status, status == "approved")
    assert len(shown) == 1
    assert "the table" in shown[0]
    assert "\x1b" not in shown[0]


async def test_pip_says_what_it_did(agent: Client, session: str) -> None:
    result = await call(agent, "sandbox_pip_install", session_id=session, packages=["./nothing-here"])
    assert result["exit_code"] != 0
    assert "nothing-here" in result["output"]


@pytest.mark.usefixtures("index")
async def test_pip_installs_from_this_machine_s_registry(agent: Client, session: str) -> None:
    result = await call(agent, "sandbox_pip_install", session_id=session, packages=["iniconfig"])
    assert result["exit_code"] == 0, result
    assert "Successfully installed iniconfig-" in result["output"]
    assert result["denied"] == []
    run = await call(
        agent, "sandbox_run", session_id=session, language="python", code="import iniconfig; print('there')"
    )
    assert run["stdout"] == "there\n"


async def test_text_is_what_a_model_reads(agent: Client, session: str) -> None:
    result = await agent.call_tool("sandbox_exec", {"session_id": session, "command": ["true"]})
    assert [type(block) for block in result.content] == [TextContent]


async def test_a_program_may_be_longer_than_an_argument(agent: Client, session: str) -> None:
    code = f"print(6 * 7) # {'x' * (1 << 20)}"
    answer = await call(agent, "sandbox_run", code=code, language="python", session_id=session)
    assert (answer["exit_code"], answer["stdout"]) == (0, "42\n")
    answer = await call(
        agent, "sandbox_exec", command=["bash", "-c", f"echo $0 # {'x' * (1 << 20)}"], session_id=session
    )
    assert (answer["exit_code"], answer["stdout"]) == (0, "bash\n")


async def test_a_part_of_a_file_is_read(agent: Client, session: str) -> None:
    await call(agent, "sandbox_write_file", path="digits", content="0123456789", session_id=session)
    for tool, name in (("sandbox_read_file", "session_id"), ("sandbox_file_read", "name")):
        answer = await call(agent, tool, path="digits", offset=3, length=4, **{name: session})
        assert (answer["content"], answer["bytes"]) == ("3456", 4)
        assert (await call(agent, tool, path="digits", offset=8, **{name: session}))["content"] == "89"
    for wrong in ({"offset": -1}, {"length": -1}):
        problem = await fail(agent, "sandbox_read_file", path="digits", session_id=session, **wrong)
        assert (problem["code"], problem["field"]) == ("invalid_argument", next(iter(wrong)))
