"""Clients on other machines: TLS, an API key with every request, and the sessions of the key's tenant."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import json
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.mcp.authentication import find_user
from k8e.doors.mcp.certificates import IssuedCertificate
from k8e.doors.mcp.server import bind
from k8e.identity.api_key import ApiKey
from k8e.identity.authority import Authority, make_request
from tests.cli.machine import DEADLINE, Machine, wait_until
from tests.gateway.house import House, open_house
from tests.mcp.agents import INITIALIZE, INITIALIZED, call, fail
from tests.mcp.test_http import HEADERS, listening, read_event

SESSIONS = 4  # that one tenant may have


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house(f"[quotas]\nsessions = {SESSIONS}\n") as house:
        yield house


@dataclass(frozen=True)
class Server:
    url: str
    authority: str

    @property
    def near(self) -> str:
        """It listens everywhere; tests go no further than loopback."""
        return self.url.replace("0.0.0.0", "127.0.0.1")

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority)


@contextlib.contextmanager
def receiving(machine: Machine, *words: str) -> Iterator[Server]:
    with machine.start("sandbox-mcp", "--http", "--http-addr", "0.0.0.0:0", *words, stderr=None) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["key_needed"] is True
        yield Server(told["listening"], told.get("ca_certificate", ""))
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == -signal.SIGINT


@pytest.fixture(scope="module")
def server(house: House) -> Iterator[Server]:
    with receiving(house.machine) as made:
        yield made


@pytest.fixture(scope="module")
def red(house: House) -> str:
    return house.make_key("red", tenant_ids=["red"])


@pytest.fixture(scope="module")
def blue(house: House) -> str:
    return house.make_key("blue", tenant_ids=["blue"])


@contextlib.asynccontextmanager
async def agent_with(server: Server, key: str, mode: str = "legacy") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, verify=server.context, timeout=DEADLINE) as plain,
        Client(streamable_http_client(server.near, http_client=plain), mode=mode) as client,
    ):
        yield client


class Sender:
    """Raw requests, one connection each."""

    def __init__(self) -> None:
        self._connections: list[http.client.HTTPConnection] = []

    def __call__(
        self, server: Server, body: object, key: str = "", method: str = "POST", **headers: str
    ) -> http.client.HTTPResponse:
        host = server.near.split("/")[2]
        connection = http.client.HTTPSConnection(host, timeout=DEADLINE, context=server.context)
        self._connections.append(connection)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        fields |= {"Authorization": f"Bearer {key}"} if key else {}
        content = json.dumps(body).encode() if body is not None else None
        connection.request(method, fields.pop("path", "/mcp"), content, {**HEADERS, **fields})
        return connection.getresponse()

    def ask(self, *words: Any, **headers: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Reads the response to its end."""
        response = self(*words, **headers)
        with response:
            return response.status, response.headers, response.read()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture
def send() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


def owned(house: House, tenant: str) -> list[str]:
    """The sessions of a tenant and its parts."""
    found = house.ask("GET", "/v1/sessions")[1]["sessions"]
    return [each["session_id"] for each in found if each["tenant_id"].partition("/")[0] == tenant]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_official_client_comes_with_a_key(house: House, server: Server, red: str, mode: str) -> None:
    async with agent_with(server, red, mode) as agent:
        first = await call(agent, "sandbox_run", code="echo kept > note")
        again = await call(agent, "sandbox_run", session_id=first["session_id"], code="cat note")
        assert again["stdout"] == "kept\n"
        assert owned(house, "red") == [first["session_id"]]
        if mode == "auto":
            await call(agent, "sandbox_destroy_session", session_id=first["session_id"])
    wait_until(lambda: owned(house, "red") == [])


async def test_the_older_form_takes_keys_too(house: House, server: Server, red: str) -> None:
    def make(
        headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, verify=server.context)

    headers = {"Authorization": f"Bearer {red}"}
    async with Client(sse_client(server.near, headers, httpx_client_factory=make), mode="legacy") as agent:
        assert (await call(agent, "sandbox_run", code="echo hi"))["stdout"] == "hi\n"
    wait_until(lambda: owned(house, "red") == [])


async def test_agents_with_one_key_cannot_see_each_other_and_its_holder_sees_both(
    house: House, server: Server, red: str, blue: str
) -> None:
    async with agent_with(server, red) as one, agent_with(server, red) as other, agent_with(server, blue) as stranger:
        mine = (await call(one, "sandbox_run", code="echo secret > note"))["session_id"]
        theirs = (await call(other, "sandbox_run", code="true"))["session_id"]
        for agent in (other, stranger):
            assert (await fail(agent, "sandbox_exec", session_id=mine, command="id"))["code"] == "session_not_found"
        assert [each["session_id"] for each in (await call(other, "sandbox_list"))["sessions"]] == [theirs]
        assert (await call(stranger, "sandbox_list"))["sessions"] == []
        seen = house.guest(red).call("ListSessions", pb.ListSessionsRequest()).sessions
        assert {each.session_id for each in seen} == {mine, theirs}
        assert list(house.guest(blue).call("ListSessions", pb.ListSessionsRequest()).sessions) == []
    wait_until(lambda: owned(house, "red") == [])


async def test_a_person_of_the_tenant_answers_what_an_agent_asks(house: House, server: Server, red: str) -> None:
    boss = house.guest(house.make_key("boss", scope="operator", tenant_ids=["red"]))
    for mode in ("legacy", "auto"):
        async with agent_with(server, red, mode) as agent:
            asked = await call(agent, "sandbox_confirm_action", action="drop the table")
            name = {"approval_id": asked["approval_id"], "session_id": asked["session_id"]}
            assert (await call(agent, "sandbox_confirm_action", **name, timeout=0))["status"] == "pending"
            request = pb.ApproveActionRequest(approval_id=asked["approval_id"], approved=True)
            assert house.guest(red).refused("ApproveAction", request)[1].code == "scope_missing"  # type: ignore[union-attr]
            await asyncio.to_thread(boss.call, "ApproveAction", request)
            assert (await call(agent, "sandbox_confirm_action", **name))["approved"] is True
            await call(agent, "sandbox_destroy_session", session_id=asked["session_id"])


async def test_all_agents_of_a_key_are_on_one_account(house: House, server: Server, red: str, blue: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent_with(server, red)) for _ in range(SESSIONS + 1)]
        for agent in agents[:SESSIONS]:
            await call(agent, "sandbox_run", code="true")
        problem = await fail(agents[SESSIONS], "sandbox_run", code="true")
        assert problem["code"] == "too_many_sessions"
        assert problem["retry_after"] > 0
        other = await stack.enter_async_context(agent_with(server, blue))
        await call(other, "sandbox_run", code="true")
    wait_until(lambda: owned(house, "red") == [])


async def test_a_key_s_own_tenant_may_be_named_and_keeps_its_session(house: House, server: Server, red: str) -> None:
    async with agent_with(server, red) as agent:
        assert (await fail(agent, "sandbox_create_session", tenant_id="blue"))["code"] == "wrong_tenant"
        kept = await call(agent, "sandbox_create_session", tenant_id="red", session_id="kept")
        assert (await call(agent, "sandbox_exec", session_id="kept", command="echo hi"))["stdout"] == "hi\n"
    assert owned(house, "red") == [kept["session_id"]]
    house.guest(red).call("DestroySession", pb.DestroySessionRequest(session_id="kept"))


def spoil(key: str, how: str) -> str:
    parsed = ApiKey.parse(key)
    return {
        "nothing of ours": "secret",
        "cut off": key[:-3],
        "another secret": replace(parsed, secret=bytes(32)).text,
        "another id": replace(parsed, key_id=bytes(8)).text,
        "another gateway's": replace(parsed, fingerprint=bytes(32)).text,
    }[how]


@pytest.mark.parametrize("how", ["nothing of ours", "cut off", "another secret", "another id", "another gateway's"])
def test_a_key_that_is_no_good_is_refused(server: Server, send: Sender, red: str, how: str) -> None:
    status, headers, body = send.ask(server, INITIALIZE, spoil(red, how))
    assert status == 401
    assert 'error="invalid_token"' in headers["WWW-Authenticate"]
    assert b"protocolVersion" not in body


def test_a_client_without_a_key_is_asked_for_one(house: House, server: Server, send: Sender) -> None:
    status, headers, body = send.ask(server, INITIALIZE)
    assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="k8e"')
    problem = json.loads(body)
    assert problem["code"] == "key_needed"
    assert "Bearer" in problem["hint"]
    assert send.ask(server, INITIALIZE, Authorization="Basic cm9vdDpyb290")[0] == 401
    log = house.machine.folder / "s" / "audit-refusals.log"
    wait_until(lambda: log.exists() and "key_needed" in log.read_text())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"path": "/.well-known/oauth-protected-resource"}, 404),
    ],
)
def test_web_pages_are_kept_out_with_a_key_as_well(
    server: Server, send: Sender, red: str, headers: dict[str, str], status: int
) -> None:
    assert send.ask(server, INITIALIZE, red, **headers)[0] == status


def test_nothing_is_said_without_tls(server: Server) -> None:
    host = server.near.split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=DEADLINE)
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("POST", "/mcp", json.dumps(INITIALIZE), HEADERS)
        connection.getresponse()
    connection.close()
    old = server.context
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    outdated = http.client.HTTPSConnection(host, timeout=DEADLINE, context=old)
    with pytest.raises(ssl.SSLError):
        outdated.connect()
    outdated.close()


def open_connection(send: Sender, server: Server, key: str) -> str:
    _, headers, _ = send.ask(server, INITIALIZE, key)
    return headers["Mcp-Session-Id"]


def test_a_connection_is_its_key_s(server: Server, send: Sender, red: str, blue: str) -> None:
    token = open_connection(send, server, red)
    assert send.ask(server, INITIALIZED, blue, Mcp_Session_Id=token)[0] == 404
    assert send.ask(server, INITIALIZED, Mcp_Session_Id=token)[0] == 401
    assert send.ask(server, INITIALIZED, red, Mcp_Session_Id=token)[0] == 202
    assert send.ask(server, None, red, "DELETE", Mcp_Session_Id=token)[0] == 200


def test_a_key_that_is_taken_back_ends_what_came_with_it(house: House, server: Server, send: Sender) -> None:
    key = house.make_key("brief", tenant_ids=["brief"])
    token = open_connection(send, server, key)
    send.ask(server, INITIALIZED, key, Mcp_Session_Id=token)
    stream = send(server, None, key, "GET", Accept="text/event-stream")
    assert read_event(stream)[0] == "session"
    params = {"name": "sandbox_run", "arguments": {"code": "echo on; sleep 765", "timeout": 1000}}
    request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {**params, "_meta": {"progressToken": 1}}}
    running = send(server, request, key, Mcp_Session_Id=token)
    while "on\\n" not in read_event(running)[1]:
        pass
    house.delete_key("brief")
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        running.read()
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        stream.read()
    wait_until(lambda: owned(house, "brief") == [])
    assert subprocess.run(["pgrep", "-f", "sleep 765"], capture_output=True).returncode == 1
    running.close()
    stream.close()
    status, _, body = send.ask(server, INITIALIZED, key, Mcp_Session_Id=token)
    assert (status, json.loads(body)["code"]) == (401, "key_revoked")


async def test_a_tenant_s_server_is_for_keys_of_that_tenant(house: House, send: Sender, red: str, blue: str) -> None:
    with receiving(house.machine, "--tenant-id", "red") as server:
        for mode in ("legacy", "auto"):
            async with agent_with(server, red, mode) as agent:
                await call(agent, "sandbox_run", code="echo kept >> note")
        status, headers, body = send.ask(server, INITIALIZE, blue)
        assert (status, json.loads(body)["code"]) == (403, "wrong_tenant")
        assert 'error="insufficient_scope"' in headers["WWW-Authenticate"]
    [kept] = owned(house, "red")
    guest = house.guest(red)
    assert guest.run(kept, "cat note").stdout == b"kept\nkept\n"
    guest.call("DestroySession", pb.DestroySessionRequest(session_id=kept))


# Loopback


@pytest.fixture(scope="module")
def near(house: House) -> Iterator[str]:
    with listening(house.machine) as url:
        yield url


def post_as(user: int, url: str, *headers: str) -> tuple[int, Any]:
    """By a program of another user."""
    words = [word for header in (*map(": ".join, HEADERS.items()), *headers) for word in ("-H", header)]
    command = ["curl", "-s", "-w", "\n%{http_code}", "-d", json.dumps(INITIALIZE), *words, url]
    done = subprocess.run(command, capture_output=True, text=True, user=user, group=user, timeout=DEADLINE, cwd="/")
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def test_on_loopback_another_user_needs_a_key(near: str, red: str) -> None:
    assert post_as(0, near)[0] == 200
    status, body = post_as(65534, near)
    assert (status, json.loads(body)["code"]) == (401, "key_needed")
    assert "65534" in json.loads(body)["detail"]
    assert post_as(65534, near, "X-Forwarded-For: 127.0.0.1")[0] == 401
    assert post_as(65534, near, f"Authorization: Bearer {red}")[0] == 200


async def test_on_loopback_a_key_that_is_given_counts(house: House, near: str, red: str) -> None:
    headers = {"Authorization": f"Bearer {red}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=DEADLINE) as plain,
        Client(streamable_http_client(near, http_client=plain), mode="legacy") as agent,
    ):
        made = await call(agent, "sandbox_run", code="true")
        assert owned(house, "red") == [made["session_id"]]
    wait_until(lambda: owned(house, "red") == [])
    assert post_as(0, near, "Authorization: Bearer k8e_nonsense")[0] == 401


def test_the_user_of_a_peer_is_known_only_while_it_is_connected(tmp_path: Path) -> None:
    row = "   0: 0100007F:1F90 0100007F:226B %s 00000000:00000000 00:00000000 00000000  1000        0 1 1\n"
    mapped = row.replace("0100007F", "0000000000000000FFFF00000100007F").replace(" 1000 ", " 1001 ")
    table, table6 = tmp_path / "tcp", tmp_path / "tcp6"
    peer, own = ("127.0.0.1", 0x1F90), ("127.0.0.1", 0x226B)
    table.write_text("header\n" + row % "01")
    assert find_user(peer, own, [table]) == 1000
    assert find_user(own, peer, [table]) is None
    for state in ("04", "05", "06", "08"):  # its process has closed it: the kernel does not name its user any more
        table.write_text("header\n" + row % state)
        assert find_user(peer, own, [table, table6]) is None
    table6.write_text("header\n" + mapped % "01")
    assert find_user(peer, own, [table, table6]) == 1001


# Certificates, and addresses beyond loopback


def make_certificate(folder: Path, *names: str) -> tuple[Path, Path, Path]:
    """As a company's own authority would: the certificate, its key, and the authority."""
    authority = Authority.open(folder / "company", 1_700_000_000)
    issued = authority.issue_server(names, time.time())
    chain, key = folder / "server.crt", folder / "server.key"
    chain.write_bytes(issued.chain)
    key.write_bytes(issued.key)
    return chain, key, folder / "company" / "ca.crt"


def test_a_certificate_that_is_brought_along_is_shown(house: House, send: Sender, red: str, tmp_path: Path) -> None:
    chain, key, authority = make_certificate(tmp_path, "agents.example", "127.0.0.1")
    with receiving(house.machine, "--tls-cert", str(chain), "--tls-key", str(key)) as made:
        assert made.authority == ""
        server = replace(made, authority=str(authority))
        port = server.near.split("/")[2].partition(":")[2]
        assert send.ask(server, INITIALIZE, red)[0] == 200
        assert send.ask(server, INITIALIZE, red, Host=f"agents.example:{port}")[0] == 200
        assert send.ask(server, INITIALIZE, red, Host=f"localhost:{port}")[0] == 421


def test_what_is_no_certificate_is_refused(house: House, tmp_path: Path) -> None:
    chain, key, _ = make_certificate(tmp_path, "127.0.0.1")
    other, request = make_request()
    (tmp_path / "other.key").write_bytes(other)
    (tmp_path / "text").write_text(request)
    listen = ("sandbox-mcp", "--http", "--http-addr", "0.0.0.0:0")
    for words in (
        ("--tls-cert", str(chain)),
        ("--tls-key", str(key)),
        ("--tls-cert", str(chain), "--tls-key", str(tmp_path / "other.key")),
        ("--tls-cert", str(tmp_path / "text"), "--tls-key", str(key)),
    ):
        done = house.machine.k8e(*listen, *words)
        assert (done.code, done.json["code"], done.json["field"]) == (1, "invalid_argument", "certificate")
    done = house.machine.k8e(*listen, "--tls-cert", str(tmp_path / "none"), "--tls-key", str(key))
    assert (done.code, done.json["code"]) == (1, "certificate_unreadable")


def test_only_root_lets_other_machines_in() -> None:
    with pytest.raises(Fault) as refused:
        bind(ipaddress.ip_address("0.0.0.0"), 0, Caller(1000))
    assert refused.value.code == "scope_missing"
    bind(ipaddress.ip_address("127.0.0.1"), 0, Caller(1000)).close()


def test_the_next_handshake_has_the_new_certificate(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, 1_700_000_000)
    own = IssuedCertificate(authority, ["localhost"])
    context = own.make_context()
    trusting = ssl.create_default_context(cadata=authority.certificate.decode())

    def shake_hands() -> bytes:
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(back, there, server_hostname="localhost")
        server = context.wrap_bio(there, back, server_side=True)
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        shown = client.getpeercert(binary_form=True)
        assert shown
        return shown

    first = shake_hands()
    assert shake_hands() == first
    own.renew(context)
    assert shake_hands() != first
