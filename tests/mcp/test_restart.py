"""A daemon that is stopped or killed while AI agents are connected: the next call goes to the next daemon, or says what
happened. A call is never run twice, and what was not run is never said to have run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from tests.cli.machine import DEADLINE, Machine, wait_until
from tests.mcp.agents import Pipes, call, pipes
from tests.sdk.conftest import stop

VERSIONS = ("2025-11-25", "2026-07-28")
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1.0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def kill(pid: int) -> None:
    stop(pid, signal.SIGKILL)


def ask(agent: Pipes, name: str, /, **arguments: Any) -> Any:
    """The result of a call, or its error."""
    number = agent.begin_call(name, **arguments)
    while "id" not in (message := agent.read()):
        pass
    assert message["id"] == number
    return message


def run(agent: Pipes, code: str) -> Any:
    return ask(agent, "sandbox_run", code=code)["result"]["structuredContent"]


@pytest.mark.parametrize(("end", "code"), [(stop, "daemon_stopped"), (kill, "connection_lost")])
def test_a_call_that_was_running_is_answered_and_the_next_one_works(machine: Machine, end: Any, code: str) -> None:
    with pipes(machine) as agent:
        agent.start()
        first = run(agent, "echo kept > note")["session_id"]
        running = agent.begin_call("sandbox_run", code="echo started; sleep 100", timeout=1000)
        assert agent.read()["params"]["message"] == "started\n"
        end(machine.daemon_pid)
        answer = agent.read()
        assert (answer["id"], answer["error"]["data"]["code"]) == (running, code)
        assert answer["error"]["data"]["hint"]
        # At once: the bridge may not have noticed yet that its connection has ended.
        second = run(agent, "cat note || echo new")
        assert second["stdout"] == "new\n"
        assert "restarted" in second["notes"][0]
        problem = ask(agent, "sandbox_exec", session_id=first, command="true")["result"]
        assert "restarted" in json.loads(problem["content"][0]["text"])["hint"]
        assert "notes" not in run(agent, "true")
        wait_until(lambda: machine.live_sessions() == [second["session_id"]])
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert agent.process.wait(DEADLINE) == 0
    wait_until(lambda: machine.live_sessions() == [])


@pytest.mark.parametrize("end", [stop, kill])
def test_an_agent_that_was_idle_notices_nothing_but_its_new_session(machine: Machine, end: Any) -> None:
    with pipes(machine) as agent, pipes(machine) as other:
        agent.start()
        other.start("2024-11-05")
        for _ in range(2):
            end(machine.daemon_pid)
            assert run(agent, "echo hi")["stdout"] == "hi\n"
        text = ask(other, "sandbox_run", code="echo there")["result"]["content"][0]["text"]
        assert json.loads(text)["stdout"] == "there\n"


def test_the_newest_version_has_no_handshake_to_repeat(machine: Machine) -> None:
    with pipes(machine) as agent:

        def ask_modern(number: int) -> Any:
            params = {"name": "sandbox_run", "arguments": {"code": "echo hi"}, "_meta": ENVELOPE}
            agent.write({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
            return agent.read()["result"]["structuredContent"]

        assert ask_modern(1)["stdout"] == "hi\n"
        stop(machine.daemon_pid)
        assert ask_modern(2)["stdout"] == "hi\n"


def test_a_call_into_a_daemon_that_is_stopping_is_run_by_the_next(machine: Machine) -> None:
    """Whatever the daemon had read of it when it was told to stop: the answer is a result, or says that it stopped."""
    with pipes(machine) as agent:
        agent.start()
        run(agent, "true")
        for _ in range(3):
            pid = machine.daemon_pid
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                number = agent.begin_call("sandbox_run", code="echo done")
                signal.pidfd_send_signal(handle, signal.SIGCONT)
                select.select([handle], [], [])
            finally:
                os.close(handle)
            while "id" not in (answer := agent.read()):
                pass
            assert answer["id"] == number
            if "error" in answer:
                assert answer["error"]["data"]["code"] == "daemon_stopped"
            else:
                assert answer["result"]["structuredContent"]["stdout"] == "done\n"
            assert run(agent, "echo next")["stdout"] == "next\n"


def test_a_connection_that_a_dying_daemon_took_and_never_read_is_made_again(machine: Machine) -> None:
    """A daemon that is killed takes connections until its last thread has ended."""
    path = machine.folder / "r" / "k8e.sock"
    with pipes(machine) as agent:
        agent.start()
        stop(machine.daemon_pid)
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(path))
            dying.listen()
            number = agent.begin_call("sandbox_run", code="echo hi")
            select.select([dying], [], [])  # the bridge is connected
            path.unlink()
        assert agent.read_answer(number)["stdout"] == "hi\n"


def test_a_call_that_is_refused_for_its_size_is_not_sent_again(machine: Machine) -> None:
    """The connection ends in order, although the daemon does not."""
    settings = machine.folder / "k8e.toml"
    before = settings.read_text()
    settings.write_text(f'{before}[quotas]\nrequest_bytes = "66m"\n')
    stop(machine.daemon_pid)

    def begin(agent: Pipes, number: int, code: str) -> None:
        meta = {"progressToken": number, "test/padding": "x" * (40 << 20)}
        params = {"name": "sandbox_run", "arguments": {"code": code, "timeout": 1000}, "_meta": meta}
        agent.write({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})

    try:
        with pipes(machine) as other, pipes(machine) as agent:
            other.start()
            agent.start()
            begin(other, 71, "echo started; sleep 1000")
            assert other.read()["params"]["message"] == "started\n"
            begin(agent, 72, "echo done")
            refusal, answer = agent.read(), agent.read()
            assert refusal["error"]["data"]["code"] == "too_many_bytes"
            assert (answer.get("id"), answer["error"]["data"]["code"]) == (72, "too_many_bytes")
            assert answer["error"]["data"]["hint"]
            assert run(agent, "echo hi")["stdout"] == "hi\n"
    finally:
        settings.write_text(before)
        stop(machine.daemon_pid)


def list_children(pid: int) -> list[str]:
    """Their states."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for child in (task / "children").read_text().split():
                states.append(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return states


def test_a_daemon_that_does_not_start_is_explained_and_leaves_no_dead_child(machine: Machine) -> None:
    settings = machine.folder / "k8e.toml"
    before = settings.read_text()
    with pipes(machine) as agent:
        agent.start()
        stop(machine.daemon_pid)
        settings.write_text("[nonsense]\n")
        try:
            for _ in range(2):
                answer = ask(agent, "sandbox_status")
                assert answer["error"]["data"]["code"] == "settings_unknown"
                assert answer["error"]["data"]["hint"]
            wait_until(lambda: list_children(agent.process.pid) == [])
        finally:
            settings.write_text(before)
        assert run(agent, "echo hi")["stdout"] == "hi\n"
        # This daemon is a child of the bridge.
        assert len(list_children(agent.process.pid)) == 1
        stop(machine.daemon_pid)
        wait_until(lambda: list_children(agent.process.pid) == [])
        assert ask(agent, "sandbox_status")["result"]["structuredContent"]["available"]


def choose_address(number: int) -> str:
    """For one daemon after the other. The kernel chooses ports above 32768: it gives this one to no other test between
    two daemons."""
    return f"127.0.0.1:{20_000 + 2 * (os.getpid() % 5000) + number}"


@contextlib.contextmanager
def listener(machine: Machine) -> Iterator[Any]:
    with machine.start("sandbox-mcp", "--http", "--http-addr", choose_address(1)) as process:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == -signal.SIGINT


async def test_the_listener_comes_back_at_its_address(machine: Machine) -> None:
    with listener(machine) as process:
        first = json.loads(process.stdout.readline())
        async with Client(first["listening"], mode="auto") as agent:
            made = await call(agent, "sandbox_run", code="echo hi")
            stop(machine.daemon_pid)
            assert json.loads(process.stderr.readline())["code"] == "daemon_stopped"
            assert not (machine.folder / "r" / "k8e.sock").exists(), "a stopped daemon is not started by a listener"
            assert machine.k8e("sandbox", "status").json["available"]
            assert json.loads(process.stdout.readline()) == first
            again = await agent.call_tool("sandbox_run", {"code": "echo hi", "session_id": made["session_id"]})
            assert json.loads(again.content[0].text)["code"] == "session_not_found"  # type: ignore[union-attr]
            assert (await call(agent, "sandbox_run", code="echo hi"))["stdout"] == "hi\n"
        kill(machine.daemon_pid)
        assert json.loads(process.stderr.readline())["code"] == "connection_lost"
        assert json.loads(process.stdout.readline()) == first
        async with Client(first["listening"], mode="legacy") as agent:
            assert (await call(agent, "sandbox_run", code="echo hi"))["stdout"] == "hi\n"
    wait_until(lambda: machine.live_sessions() == [])


def test_an_agent_of_a_gateway_goes_on_with_the_next_daemon(machine: Machine) -> None:
    """Its daemon may be another one, on another machine: it is waited for, and never started from here."""
    settings = machine.folder / "k8e.toml"
    before = settings.read_text()
    address = choose_address(0)
    settings.write_text(before.replace("127.0.0.1:0", address))
    stop(machine.daemon_pid)
    made = machine.k8e("sandbox-apikey", "create", "far", "--tenant", "far").json
    assert made["endpoint"] == address
    home = machine.folder / "far"
    home.mkdir()
    place = {"K8E_RUN_DIR": str(home / "r"), "K8E_STATE_DIR": str(home / "s")}
    known = {"K8E_SANDBOX_ENDPOINT": made["endpoint"], "K8E_SANDBOX_APIKEY": made["key"]}
    try:
        with pipes(Machine(home, home, {**place, **known})) as agent:
            agent.start()
            for end, code in ((stop, "daemon_stopped"), (kill, "connection_lost")):
                assert run(agent, "echo hi")["stdout"] == "hi\n"
                running = agent.begin_call("sandbox_run", code="echo started; sleep 100", timeout=1000)
                while agent.read()["params"]["message"] != "started\n":
                    pass
                end(machine.daemon_pid)
                answer = agent.read()
                assert (answer["id"], answer["error"]["data"]["code"]) == (running, code)
                # More than fits on the way to a gateway that is not there yet.
                number = agent.begin_call("sandbox_run", code=f"cat note || echo new # {'x' * (2 << 20)}")
                assert machine.k8e("sandbox", "status").json["available"]
                assert agent.read_answer(number)["stdout"] == "new\n"
    finally:
        machine.k8e("sandbox-apikey", "delete", "far")
        settings.write_text(before)
    wait_until(lambda: machine.live_sessions() == [])
