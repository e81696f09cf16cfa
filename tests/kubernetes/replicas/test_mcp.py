"""MCP over HTTP at two gateways: each serves every client, and one of them is killed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import wait_until
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.replicas.test_two_gateways import Gateway, wait_for_leader
from tests.mcp.agents import INITIALIZE, INITIALIZED, call
from tests.mcp.test_keys import Sender, Server, agent_with


@pytest.fixture
def gateways(site: Site, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    pair = (Gateway(site, tmp_path / "a", mcp=True), Gateway(site, tmp_path / "b", mcp=True))
    try:
        for each in pair:
            each.start()
        for each in pair:
            each.wait_until_open()
        yield wait_for_leader(*pair)
    finally:
        for each in pair:
            each.stop()


@pytest.fixture
def authority(site: Site, gateways: tuple[Gateway, Gateway], tmp_path: Path) -> Path:
    path = tmp_path / "ca.crt"
    path.write_bytes(base64.b64decode(site.kubectl.get("secret/k8e-gateway")["data"]["ca.crt"]))
    return path


def address_of(gateway: Gateway, authority: Path) -> Server:
    return Server(f"https://localhost:{gateway.mcp}/mcp", str(authority))


def list_sessions(gateway: Gateway, key: str) -> list[str]:
    return [each["session_id"] for each in gateway.ask("sandbox", "sessions", key=key)["sessions"]]


async def test_a_client_without_a_connection_goes_on_after_the_leader_was_killed(
    gateways: tuple[Gateway, Gateway], authority: Path
) -> None:
    leader, other = gateways
    key = (await asyncio.to_thread(leader.ask, "sandbox-apikey", "create", "agents", "--tenant", "agents"))["key"]
    async with agent_with(address_of(other, authority), key, "auto") as agent:
        handle = (await call(agent, "sandbox_run", code="echo kept > note"))["session_id"]
        async with agent_with(address_of(leader, authority), key, "auto") as another:
            assert (await call(another, "sandbox_run", session_id=handle, code="cat note"))["stdout"] == "kept\n"
        await asyncio.to_thread(leader.kill)
        # The next call, at once, at the gateway that is left.
        assert (await call(agent, "sandbox_run", session_id=handle, code="cat note"))["stdout"] == "kept\n"
        assert other.leads
        await call(agent, "sandbox_destroy_session", session_id=handle)


def test_a_connection_ends_with_its_leader_and_the_next_one_is_served(
    gateways: tuple[Gateway, Gateway], authority: Path
) -> None:
    """As the protocol has it: 404 for a session that is not known, and the client begins a new one."""
    leader, other = gateways
    key = leader.ask("sandbox-apikey", "create", "connected", "--tenant", "connected")["key"]
    server, sender = address_of(other, authority), Sender()
    run = {"name": "sandbox_run", "arguments": {"code": "echo here"}}
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": run}

    def connect() -> str:
        status, headers, said = sender.ask(server, INITIALIZE, key)
        assert status == 200, said
        token = str(headers["Mcp-Session-Id"])
        assert sender.ask(server, INITIALIZED, key, Mcp_Session_Id=token)[0] == 202
        status, _, said = sender.ask(server, message, key, Mcp_Session_Id=token)
        assert (status, b"here" in said) == (200, True), said
        return token

    try:
        token = connect()
        (of_connection,) = list_sessions(other, key)
        leader.kill()
        status, _, said = sender.ask(server, message, key, Mcp_Session_Id=token)
        assert (status, "Session not found" in json.loads(said)["error"]["message"]) == (404, True), said
        connect()
        wait_until(lambda: of_connection not in list_sessions(other, key))
    finally:
        sender.close()
