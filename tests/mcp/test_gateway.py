"""`k8e sandbox-mcp --endpoint HOST:PORT`: the same pipes, and a gateway at their other end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc
import pytest
from mcp import Client, StdioServerParameters
from mcp_types.version import LATEST_MODERN_VERSION

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.message_limits import IDLE_EACH
from k8e.doors.grpc.methods import METHODS
from tests.cli.machine import DEADLINE, K8E, Machine, wait_until
from tests.gateway.house import Guest, House
from tests.mcp.agents import INITIALIZE, INITIALIZED, Pipes, call, fail
from tests.mcp.test_keys import owned
from tests.mcp.test_stdio import ECHO


@pytest.fixture(scope="module")
def red(house: House) -> str:
    return house.make_key("red", tenant_ids=["red"])


def far(house: House, key: str = "", **more: str) -> Machine:
    """Another machine, which has a key of the gateway, and neither its socket nor its files."""
    home = house.machine.folder / "far"
    home.mkdir(exist_ok=True)
    place = {"K8E_RUN_DIR": str(home / "r"), "K8E_STATE_DIR": str(home / "s")}
    keys = {"K8E_SANDBOX_APIKEY": key} if key else {}
    return Machine(home, home, {**place, "K8E_SANDBOX_ENDPOINT": house.endpoint, **keys, **more})


@contextlib.asynccontextmanager
async def far_agent(machine: Machine, *words: str, mode: str = "legacy") -> AsyncIterator[Client]:
    server = StdioServerParameters(command=str(K8E), args=["sandbox-mcp", *words], env=machine.env)
    async with Client(server, mode=mode) as client:
        yield client


@contextlib.contextmanager
def far_pipes(machine: Machine, *words: str) -> Iterator[Pipes]:
    with machine.start("sandbox-mcp", *words, stderr=None) as process:
        yield Pipes(process)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_official_client_uses_a_gateway(house: House, red: str, mode: str) -> None:
    async with far_agent(far(house, red), mode=mode) as agent:
        assert mode == "legacy" or agent.protocol_version == LATEST_MODERN_VERSION
        first = await call(agent, "sandbox_run", code="echo kept > note")
        second = await call(agent, "sandbox_run", code="cat note")
        assert (second["stdout"], second["session_id"]) == ("kept\n", first["session_id"])
        assert owned(house, "red") == [first["session_id"]]
    wait_until(lambda: owned(house, "red") == [])


def test_the_line_that_everybody_tries_first_works_from_afar(house: House, red: str) -> None:
    line = ECHO.replace("k8e sandbox-mcp", f"k8e sandbox-mcp --endpoint {house.endpoint}")
    machine = far(house, red)
    machine.overrides.pop("K8E_SANDBOX_ENDPOINT")
    assert machine.shell(line).json["result"]["serverInfo"]["name"] == "k8e-sandbox"


async def test_two_agents_with_one_key_cannot_see_each_other(house: House, red: str) -> None:
    machine = far(house, red)
    async with far_agent(machine) as one, far_agent(machine) as other:
        mine = (await call(one, "sandbox_run", code="true"))["session_id"]
        assert (await fail(other, "sandbox_exec", session_id=mine, command="id"))["code"] == "session_not_found"
        assert (await call(other, "sandbox_list"))["sessions"] == []


async def test_the_key_s_tenant_keeps_its_session(house: House, red: str) -> None:
    machine = far(house, red)
    for _ in range(2):
        async with far_agent(machine, "--tenant-id", "red") as agent:
            await call(agent, "sandbox_run", code="echo kept >> note")
    [kept] = owned(house, "red")
    guest = house.guest(red)
    assert guest.run(kept, "cat note").stdout == b"kept\nkept\n"
    guest.call("DestroySession", pb.DestroySessionRequest(session_id=kept))
    done = machine.k8e("sandbox-mcp", "--tenant-id", "blue", stdin=json.dumps(INITIALIZE).encode())
    assert (done.code, done.stdout, json.loads(done.stderr)["code"]) == (1, b"", "wrong_tenant")


def test_a_script_that_writes_everything_and_waits_is_answered(house: House, red: str) -> None:
    content = "x" * 3_000_000  # several messages, and several answers
    params = {"name": "sandbox_run", "arguments": {"code": f"sleep 0.3; echo done #{content}"}}
    messages = [INITIALIZE, INITIALIZED, {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}]
    done = far(house, red).k8e("sandbox-mcp", stdin="\n".join(map(json.dumps, messages)).encode())
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert (done.code, done.stderr) == (0, b"")
    assert json.loads(answers[2]["result"]["content"][0]["text"])["stdout"] == "done\n"


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_client_that_goes_away_in_the_middle_leaves_nothing(house: House, red: str, how: str) -> None:
    with far_pipes(far(house, red)) as agent:
        agent.start()
        agent.begin_call("sandbox_run", code="echo started; sleep 986", timeout=1000)
        assert agent.read()["params"]["message"] == "started\n"
        if how == "kill":
            agent.process.send_signal(signal.SIGKILL)
        else:
            assert agent.process.stdin is not None
            assert agent.process.stdout is not None
            agent.process.stdin.close()
            agent.process.stdout.close()
        agent.process.wait(DEADLINE)
    wait_until(lambda: owned(house, "red") == [])
    assert subprocess.run(["pgrep", "-f", "sleep 986"], capture_output=True).returncode == 1


def test_a_key_that_is_taken_back_ends_its_agents(house: House) -> None:
    key = house.make_key("brief", tenant_ids=["brief"])
    with far(house, key).start("sandbox-mcp") as process:
        agent = Pipes(process)
        agent.start()
        agent.begin_call("sandbox_run", code="echo started; sleep 985", timeout=1000)
        assert agent.read()["params"]["message"] == "started\n"
        house.delete_key("brief")
        assert process.stderr is not None
        assert json.loads(process.stderr.read())["code"] == "key_revoked"
        assert process.wait(DEADLINE) == 1
    wait_until(lambda: owned(house, "brief") == [])


def test_a_user_without_credentials_is_told_on_stderr(house: House) -> None:
    """Only the authority is known: `K8E_SANDBOX_CERT=/path/to/ca.crt`, as the README of k8e prints it."""
    authority = str(house.machine.folder / "s" / "identity" / "ca.crt")
    done = far(house, K8E_SANDBOX_CERT=authority).k8e("sandbox-mcp", stdin=json.dumps(INITIALIZE).encode())
    assert (done.code, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["code"] == "not_logged_in"
    unreachable = far(house, K8E_SANDBOX_ENDPOINT="127.0.0.1:1", K8E_SANDBOX_CERT=authority)
    done = unreachable.k8e("sandbox-mcp", stdin=json.dumps(INITIALIZE).encode())
    assert (done.code, done.stdout, json.loads(done.stderr)["code"]) == (2, b"", "unreachable")


def test_http_is_for_the_gateway_s_own_machine(house: House, red: str) -> None:
    done = far(house, red).k8e("sandbox-mcp", "--http", "--http-addr", "127.0.0.1:0")
    assert (done.code, done.json["code"]) == (1, "mcp_not_remote")


class Held:
    """A call whose caller keeps its input open."""

    def __init__(self, guest: Guest, *messages: pb.ConnectAgentRequest) -> None:
        self._over = threading.Event()

        def send() -> Iterator[pb.ConnectAgentRequest]:
            yield from messages
            self._over.wait(DEADLINE)

        method = METHODS["ConnectAgent"]
        make: Any = guest.channel.stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        self.call = make(send())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.call.cancel()


def test_what_is_no_part_of_it_is_refused_and_agents_are_counted(house: House) -> None:
    guest = house.tenant("connection_limits")
    options = pb.ConnectAgentRequest(options=pb.AgentOptions())
    code, detail = guest.refused("ConnectAgent", pb.ConnectAgentRequest(content=b"x"))
    assert (code, detail and detail.code) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_request")
    for late in (options, pb.ConnectAgentRequest(content=b"x" * (2 << 20))):
        assert guest.refused("ConnectAgent", options, late)[0] is grpc.StatusCode.INVALID_ARGUMENT
    ping = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE_EACH):
            waiting = stack.enter_context(Held(guest, options, pb.ConnectAgentRequest(content=ping)))
            assert b'"id":1' in next(iter(waiting.call)).content
        assert guest.refused("ConnectAgent", options)[1].code == "too_many_streams"  # type: ignore[union-attr]
        # While they are all silent, no other call waits for them.
        assert guest.call("Status", pb.StatusRequest()).available
