"""A gateway that hangs, or is killed, hangs no client: the command line, agents and the library say so, and whether a
command may have run."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from sandbox_client import DeadlineExceeded, RunLost, SandboxClient, Unavailable
from tests.cli.machine import Machine, run_launcher, wait_until
from tests.cli.test_silence import stopped
from tests.gateway.house import House, make_machine

PATIENCE = "6"  # pings are 6 seconds apart, and answered within 4


class Remote:
    """A gateway, and another machine whose user has a key for it and has logged in."""

    def __init__(self, machine: Machine, daemon: subprocess.Popen[bytes]) -> None:
        self.machine = machine
        self.daemon = daemon
        self.house = House(machine)
        self.key = self.house.make_key("far", tenant_ids=["acme"])
        home = machine.folder / "home"
        home.mkdir()
        there = {"K8E_SANDBOX_ENDPOINT": self.house.endpoint, "K8E_SANDBOX_APIKEY": self.key}
        self.far = Machine(machine.folder, home, {**there, "K8E_RUN_DIR": str(home / "no"), "K8E_PATIENCE": PATIENCE})
        self.session = str(self.far.run("true").json["session_id"])

    def wait_for(self, name: str) -> None:
        wait_until(lambda: name in self.far.run("ls").json["stdout"].split())

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.wait()
        self.daemon.returncode = 0  # as expected


@pytest.fixture
def remote() -> Iterator[Remote]:
    with make_machine() as machine, contextlib.ExitStack() as stack:
        stack.callback(clear_up, machine)
        daemon = stack.enter_context(run_launcher(machine))
        remote = Remote(machine, daemon)
        stack.callback(close, remote.house)
        yield remote


def close(house: House) -> None:
    with contextlib.suppress(grpc.RpcError, OSError):  # its gateway may be gone
        house.close()


def clear_up(machine: Machine) -> None:
    with run_launcher(machine):
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)


def test_one_that_hangs_is_said(remote: Remote) -> None:
    far = remote.far
    words = ["sandbox", "run", "--timeout", "1000", "--session-id", remote.session]
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(far.start(*words, "touch whole; sleep 1000"))
        raw = stack.enter_context(far.start(*words, "touch raw; sleep 1000", "--raw"))
        agent = stack.enter_context(far.start("sandbox-mcp"))
        assert agent.stdin
        assert agent.stdout
        agent.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        agent.stdin.flush()
        assert b'"id":1' in agent.stdout.readline()
        remote.wait_for("whole")
        remote.wait_for("raw")
        stack.enter_context(stopped(remote.daemon))
        agent.stdin.write(b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}\n')
        agent.stdin.flush()
        commands = (["sandbox", "sessions"], ["sandbox", "run", "touch late"], ["sandbox", "create"])
        for client in [stack.enter_context(far.start(*command)) for command in commands]:
            said, _ = client.communicate(timeout=60)
            assert (client.returncode, b'"unreachable"' in said) == (2, True), said
        said, _ = whole.communicate(timeout=60)
        assert (whole.returncode, b'"connection_lost"' in said) == (1, True), said
        _, told = raw.communicate(timeout=60)
        assert (raw.returncode, b'"connection_lost"' in told) == (1, True), told
        answer = json.loads(agent.stdout.readline())  # the bridge lives on, for the next daemon
        assert (answer["id"], answer["error"]["data"]["code"]) == (2, "connection_lost"), answer
    assert "late" not in far.run("ls").json["stdout"]


def test_one_that_is_killed_leaves_a_commands_end_unknown(remote: Remote) -> None:
    far = remote.far
    with contextlib.ExitStack() as stack:
        words = ["sandbox", "run", "--timeout", "1000", "--session-id", remote.session]
        whole = stack.enter_context(far.start(*words, "touch whole; sleep 1000"))
        raw = stack.enter_context(far.start(*words, "touch raw; sleep 1000", "--raw"))
        remote.wait_for("whole")
        remote.wait_for("raw")
        remote.kill()
        said, _ = whole.communicate(timeout=60)
        _, told = raw.communicate(timeout=60)
        assert [whole.returncode, raw.returncode] == [1, 1]
        assert b'"connection_lost"' in said
        assert b'"connection_lost"' in told
        done = far.run("true")
        assert (done.code, done.json["code"]) == (2, "unreachable")


def test_a_command_that_is_silent_is_not_cut(remote: Remote) -> None:
    """For longer than several pings."""
    done = remote.far.run("sleep 14; echo done", "--timeout", "60", "--raw")
    assert (done.code, done.stdout) == (0, b"done\n")


def test_the_library_tells_both_apart(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client._requests.MARGIN", 2.0)  # which a call has on top of its command
    with SandboxClient(remote.house.endpoint, "acme", api_key=remote.key) as client:
        stream = iter(client.exec_stream(remote.session, "echo ready; sleep 1000", 1000))
        assert next(stream).data == b"ready\n"
        with stopped(remote.daemon), pytest.raises(DeadlineExceeded):
            client.exec(remote.session, "sleep 1000", timeout=1)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.exec, remote.session, "touch ran; sleep 1000", 1000)
            remote.wait_for("ran")
            remote.kill()
            with pytest.raises(RunLost):
                running.result()
        with pytest.raises(RunLost):
            list(stream)
        while True:
            try:
                client.exec(remote.session, "true")
            except RunLost:
                continue  # gRPC has not noticed yet that the connection is closed
            except Unavailable:
                break
