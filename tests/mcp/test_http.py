"""`k8e sandbox-mcp --http`: many clients at one address, each with its own sessions."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_MODERN_VERSION

from tests.cli.machine import DEADLINE, Machine, wait_until
from tests.mcp.agents import INITIALIZE, INITIALIZED, call, fail

BOTH = "application/json, text/event-stream"
HEADERS = {"Content-Type": "application/json", "Accept": BOTH}


@contextlib.contextmanager
def listening(machine: Machine, *words: str) -> Iterator[str]:
    with machine.start("sandbox-mcp", "--http", "--http-addr", "127.0.0.1:0", *words, stderr=None) as process:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["listening"])
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == -signal.SIGINT


@pytest.fixture(scope="module")
def url(machine: Machine) -> Iterator[str]:
    with listening(machine) as made:
        yield made


class Browser:
    """Raw requests, one connection each."""

    def __init__(self, url: str) -> None:
        self._host = url.split("/")[2]
        self._connections: list[http.client.HTTPConnection] = []

    def send(self, method: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, timeout=DEADLINE)
        self._connections.append(connection)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        path = fields.pop("path", "/mcp")
        connection.request(method, path, content, {**(HEADERS if method == "POST" else {}), **fields})
        return connection.getresponse()

    def leave(self, response: http.client.HTTPResponse | None = None) -> None:
        """Closes all connections."""
        if response is not None:
            response.close()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def browsing(url: str) -> Iterator[Browser]:
    browser = Browser(url)
    try:
        yield browser
    finally:
        browser.leave()


@pytest.fixture
def browser(url: str) -> Iterator[Browser]:
    with browsing(url) as made:
        yield made


def read_event(response: http.client.HTTPResponse) -> tuple[str, str]:
    event, data = "", ""
    while line := response.readline().decode().rstrip("\r\n"):
        field, _, value = line.partition(": ")
        event, data = (value, data) if field == "event" else (event, value) if field == "data" else (event, data)
    return event, data


async def test_each_agent_has_a_session_that_ends_with_it(machine: Machine, url: str) -> None:
    async with Client(url, mode="legacy") as one, Client(url, mode="legacy") as other:
        assert one.protocol_version == HANDSHAKE_PROTOCOL_VERSIONS[-1]
        mine = await call(one, "sandbox_run", code="echo secret > note")
        again = await call(one, "sandbox_run", code="cat note")
        assert (again["stdout"], again["session_id"]) == ("secret\n", mine["session_id"])
        theirs = await call(other, "sandbox_run", code="cat note")
        assert (theirs["exit_code"], theirs["session_id"] == mine["session_id"]) == (1, False)
        problem = await fail(other, "sandbox_exec", session_id=mine["session_id"], command="cat note")
        assert problem["code"] == "session_not_found"
        assert [each["session_id"] for each in (await call(other, "sandbox_list"))["sessions"]] == [
            theirs["session_id"]
        ]
        # The kernel does not say who asks here, so a client cannot name other tenants.
        assert (await fail(one, "sandbox_create_session", tenant_id="web"))["code"] == "wrong_tenant"
    wait_until(lambda: machine.live_sessions() == [])


async def test_without_connections_a_session_is_found_by_its_name_alone(machine: Machine, url: str) -> None:
    async with Client(url, mode="auto") as one, Client(url, mode="auto") as other:
        assert one.protocol_version == LATEST_MODERN_VERSION
        made = await call(one, "sandbox_run", code="echo kept > note")
        again = await call(one, "sandbox_run", session_id=made["session_id"], code="cat note")
        assert again["stdout"] == "kept\n"
        assert (await call(other, "sandbox_list"))["sessions"] == []
        fresh = await call(other, "sandbox_run", code="cat note")
        assert fresh["exit_code"] == 1
        assert (await fail(one, "sandbox_create_session", session_id="mine"))["code"] == "session_id_chosen"
        named = await call(one, "sandbox_create_session", runtime_class="native")
        run = await call(one, "sandbox_exec", session_id=named["session_id"], command="seq 1000", max_output=10)
        rest = await call(other, "sandbox_read_output", uri=run["full_output"]["stdout"], offset=3, length=4)
        assert (rest["content"], rest["total"], rest["more"]) == ("\n3\n4", run["stdout_bytes"], True)
        assert (await other.list_resources()).resources == [], "an output is found by its address alone"
        temporary = await call(one, "sandbox_run", command=["echo", "hi"])
        assert temporary["stdout"] == "hi\n"
        child = await call(one, "sandbox_run_subagent", parent_session_id=made["session_id"])
        seen = await call(other, "sandbox_exec", session_id=child["session_id"], command="cat note")
        assert seen["stdout"] == "kept\n", "its name leads to it, too"
        for session in (made, fresh, named):
            await call(other, "sandbox_destroy_session", session_id=session["session_id"])
        gone = await fail(one, "sandbox_exec", session_id=child["session_id"], command="cat note")
        assert gone["code"] == "session_not_found"
    wait_until(lambda: machine.live_sessions() == [])


async def test_the_official_client_of_the_first_version_is_served(machine: Machine, url: str) -> None:
    async with Client(sse_client(url), mode="legacy") as agent:
        first = await call(agent, "sandbox_run", code="echo kept > note")
        assert (await call(agent, "sandbox_run", code="cat note"))["stdout"] == "kept\n"
        assert machine.live_sessions() == [first["session_id"]]
    wait_until(lambda: machine.live_sessions() == [])


def test_the_older_form_answers_in_the_body_and_in_the_stream(machine: Machine, browser: Browser) -> None:
    stream = browser.send("GET", Accept="text/event-stream")
    assert stream.status == 200
    event, token = read_event(stream)
    assert event == "session"
    assert read_event(stream) == ("endpoint", f"/mcp?session_id={token}")

    def post(message: object) -> Any:
        response = browser.send("POST", message, Mcp_Session_Id=token)
        body = response.read()
        response.close()
        return (response.status, json.loads(body) if body else None)

    status, answer = post(INITIALIZE)
    assert (status, answer["result"]["protocolVersion"]) == (200, "2025-11-25")
    assert json.loads(read_event(stream)[1]) == answer
    assert post(INITIALIZED) == (202, None)
    params = {"name": "sandbox_run", "arguments": {"code": "echo hi"}}
    status, answer = post({"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": params})
    assert answer["result"]["structuredContent"]["stdout"] == "hi\n"
    assert json.loads(read_event(stream)[1]) == answer
    assert post(b"{")[0] == 400
    assert len(machine.live_sessions()) == 1
    browser.leave(stream)
    wait_until(lambda: machine.live_sessions() == [])
    assert browser.send("POST", INITIALIZE, Mcp_Session_Id=token).status == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Mcp-Session-Id": "0" * 32}, 404),
        ({"Content-Type": "text/plain"}, 400),
        ({"path": "/"}, 404),
        ({"path": "/mcp/../x"}, 404),
    ],
)
def test_a_request_that_is_no_client_s_is_refused(browser: Browser, headers: dict[str, str], status: int) -> None:
    response = browser.send("POST", INITIALIZE, **headers)
    assert response.status == status
    assert b"protocolVersion" not in response.read()


def test_the_server_s_own_origin_is_taken(url: str, browser: Browser) -> None:
    response = browser.send("POST", INITIALIZE, Origin=url.removesuffix("/mcp"))
    assert response.status == 200
    response.read()


def test_a_client_that_breaks_off_leaves_nothing(machine: Machine, browser: Browser) -> None:
    """The command ends at once, and the session soon, because this client has nothing else open."""
    opened = browser.send("POST", INITIALIZE)
    token = opened.getheader("Mcp-Session-Id")
    assert token
    opened.read()
    assert browser.send("POST", INITIALIZED, Mcp_Session_Id=token).status == 202
    meta = {"progressToken": 1}
    params = {"name": "sandbox_run", "arguments": {"code": "echo on; sleep 876", "timeout": 1000}, "_meta": meta}
    running = browser.send(
        "POST", {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}, Mcp_Session_Id=token
    )
    while "on\\n" not in read_event(running)[1]:
        pass
    [session] = machine.live_sessions()
    browser.leave(running)
    wait_until(lambda: session not in machine.live_sessions() or machine.running(session) == [])
    wait_until(lambda: machine.live_sessions() == [])
    assert subprocess.run(["pgrep", "-f", "sleep 876"], capture_output=True).returncode == 1


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_tenant_s_session_is_found_by_all_and_outlives_the_server(machine: Machine, mode: str) -> None:
    with listening(machine, "--tenant-id", "web") as url:
        async with Client(url, mode=mode) as one:
            made = await call(one, "sandbox_run", code="echo kept > note")
        async with Client(url, mode=mode) as other:
            found = await call(other, "sandbox_run", code="cat note")
    assert (found["stdout"], found["session_id"]) == ("kept\n", made["session_id"])
    assert machine.live_sessions() == [made["session_id"]]
    machine.k8e("sandbox", "destroy", made["session_id"])


async def test_the_end_of_the_command_is_the_end_of_its_agents(machine: Machine) -> None:
    with listening(machine) as url:
        async with Client(url, mode="auto") as agent:
            await call(agent, "sandbox_run", code="true")
        with browsing(url) as browser:
            response = browser.send("POST", INITIALIZE)
            assert response.status == 200
            response.read()
        assert len(machine.live_sessions()) == 1
    wait_until(lambda: machine.live_sessions() == [])
    with browsing(url) as browser, pytest.raises(ConnectionRefusedError):
        browser.send("POST", INITIALIZE)


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("example.com:80", "invalid_argument"),
        ("127.0.0.1", "invalid_argument"),
        (":99999", "invalid_argument"),
    ],
)
def test_an_address_that_is_none_is_refused(machine: Machine, address: str, code: str) -> None:
    done = machine.k8e("sandbox-mcp", "--http", "--http-addr", address)
    assert (done.code, done.json["code"]) == (1, code)


def test_an_address_that_is_taken_is_said_to_be(machine: Machine, url: str) -> None:
    taken = url.split("/")[2]
    done = machine.k8e("sandbox-mcp", "--http", env={"K8E_SANDBOX_MCP_ADDR": taken})
    assert (done.code, done.json["code"]) == (1, "address_unusable")
