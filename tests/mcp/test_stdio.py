"""`k8e sandbox-mcp` on its pipes: the protocol, its versions, beginnings and ends."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_MODERN_VERSION

from tests.cli.machine import DEADLINE, Machine, wait_until
from tests.mcp.agents import INITIALIZE, INITIALIZED, Pipes, call, fail, pipes, stdio_agent

# As the README of k8e prints it.
ECHO = """\
echo '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2024-11-05",\
"clientInfo":{"name":"test","version":"1.0"},"capabilities":{}}}' \\
| k8e sandbox-mcp"""


def test_the_line_that_everybody_tries_first(machine: Machine) -> None:
    answer = machine.shell(ECHO).json
    assert answer["id"] == 1
    assert answer["result"]["protocolVersion"] == "2024-11-05"
    assert answer["result"]["serverInfo"]["name"] == "k8e-sandbox"
    assert "tools" in answer["result"]["capabilities"]


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
def test_every_version_with_a_handshake_is_negotiated(machine: Machine, version: str) -> None:
    with pipes(machine) as agent:
        assert agent.start(version)["result"]["protocolVersion"] == version
        agent.begin_call("sandbox_status")
        assert json.loads(agent.read()["result"]["content"][0]["text"])["available"]


def test_an_unknown_version_is_answered_with_the_newest_that_is_known(machine: Machine) -> None:
    with pipes(machine) as agent:
        assert agent.start("1999-01-01")["result"]["protocolVersion"] == HANDSHAKE_PROTOCOL_VERSIONS[-1]


async def test_the_newest_version_needs_no_handshake_and_keeps_its_session(machine: Machine) -> None:
    async with stdio_agent(machine, mode="auto") as agent:
        assert agent.protocol_version == LATEST_MODERN_VERSION
        first = await call(agent, "sandbox_run", code="echo kept > note")
        second = await call(agent, "sandbox_run", code="cat note")
        assert second["stdout"] == "kept\n"
        assert second["session_id"] == first["session_id"]
    wait_until(lambda: first["session_id"] not in machine.live_sessions())


def test_a_script_that_writes_everything_and_waits_is_answered(machine: Machine) -> None:
    call_tool = {"name": "sandbox_run", "arguments": {"code": "sleep 0.5; echo done"}}
    messages = [
        INITIALIZE,
        INITIALIZED,
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call_tool},
    ]
    done = machine.k8e("sandbox-mcp", stdin="\n".join(map(json.dumps, messages)).encode())
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert answers[2]["result"]["structuredContent"]["stdout"] == "done\n"
    assert done.code == 0
    assert done.stderr == b""


def test_what_is_no_message_is_answered_and_the_connection_goes_on(machine: Machine) -> None:
    with pipes(machine) as agent:
        agent.start()
        agent.write(b"{not json")
        assert agent.read()["error"]["code"] == -32700
        agent.write(b'{"json": "but no message"}')
        answer = agent.read()
        assert (answer["id"], answer["error"]["code"]) == (None, -32600)
        agent.write(b"")
        agent.write(b"\xff\xfe")
        assert agent.read()["error"]["code"] == -32700
        agent.begin_call("sandbox_nothing")
        assert agent.read()["error"]["code"] == -32602
        agent.begin_call("sandbox_status")
        assert agent.read()["result"]["structuredContent"]["available"] is True


async def test_two_agents_cannot_see_each_other(machine: Machine) -> None:
    async with stdio_agent(machine) as one, stdio_agent(machine) as other:
        mine = await call(one, "sandbox_run", code="echo secret > note")
        named = await call(one, "sandbox_create_session", session_id="mine", runtime_class="native")
        assert named["session_id"] == "mine"
        for session in (mine["session_id"], "mine"):
            assert (await fail(other, "sandbox_exec", session_id=session, command="cat note"))["code"] == (
                "session_not_found"
            )
            assert (await fail(other, "sandbox_destroy_session", session_id=session))["code"] == "session_not_found"
        assert (await call(other, "sandbox_list"))["sessions"] == []
        theirs = await call(other, "sandbox_run", code="cat note")
        assert theirs["session_id"] != mine["session_id"]
        assert theirs["exit_code"] == 1
        assert {each["session_id"] for each in (await call(one, "sandbox_list"))["sessions"]} == {
            "mine",
            mine["session_id"],
        }
        # Two may use one name: each means its own.
        await call(other, "sandbox_create_session", session_id="mine", runtime_class="native")
    wait_until(lambda: machine.live_sessions() == [])


async def test_a_tenant_keeps_its_session(machine: Machine) -> None:
    async with stdio_agent(machine, "--tenant-id", "web") as agent:
        first = await call(agent, "sandbox_run", code="echo kept > note")
    async with stdio_agent(machine, "--tenant-id", "web") as agent:
        second = await call(agent, "sandbox_run", code="cat note")
    assert second["stdout"] == "kept\n"
    assert second["session_id"] == first["session_id"]
    async with stdio_agent(machine) as agent:
        # Naming the tenant is what the command line does as well.
        assert (await fail(agent, "sandbox_exec", session_id=first["session_id"], command="id"))["code"] == (
            "session_not_found"
        )
        made = await call(agent, "sandbox_create_session", tenant_id="web", session_id="s2", runtime_class="native")
        assert made["session_id"] == "s2"
    assert sorted(machine.live_sessions()) == sorted([first["session_id"], "s2"])
    for session in (first["session_id"], "s2"):
        machine.k8e("sandbox", "destroy", session)


@pytest.mark.parametrize("tenant", ["../x", "web/part", "-x", "x" * 64])
def test_a_tenant_that_cannot_be_is_refused_before_anything_is_said(machine: Machine, tenant: str) -> None:
    done = machine.k8e("sandbox-mcp", f"--tenant-id={tenant}", stdin=json.dumps(INITIALIZE).encode())
    assert (done.code, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["code"] == "invalid_argument"


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_client_that_goes_away_in_the_middle_leaves_nothing(machine: Machine, how: str) -> None:
    with machine.start("sandbox-mcp") as process:
        agent = Pipes(process)
        agent.start()
        agent.begin_call("sandbox_run", code="echo started; sleep 987", timeout=1000)
        progress = agent.read()
        assert progress["params"]["message"] == "started\n"
        assert len(machine.live_sessions()) == 1
        if how == "kill":
            agent.process.send_signal(signal.SIGKILL)
        else:
            # As when the agent dies: both its ends are closed, and no signal comes.
            assert agent.process.stdin is not None
            assert agent.process.stdout is not None
            agent.process.stdin.close()
            agent.process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == (-signal.SIGKILL if how == "kill" else 0)
    wait_until(lambda: machine.live_sessions() == [])
    assert subprocess.run(["pgrep", "-f", "sleep 987"], capture_output=True).returncode == 1
