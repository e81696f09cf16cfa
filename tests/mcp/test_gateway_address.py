"""`[gateway] mcp`: the daemon serves MCP over HTTP for as long as it runs, to clients with a key alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.cli.machine import wait_until
from tests.gateway.house import House, open_house
from tests.mcp.agents import INITIALIZE, call
from tests.mcp.test_keys import Sender, Server, agent_with


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


@pytest.fixture(scope="module")
def port() -> int:
    return find_port()


@pytest.fixture(scope="module")
def house(port: int) -> Iterator[House]:
    with open_house(f'mcp = "127.0.0.1:{port}"\n') as house:
        yield house


@pytest.fixture(scope="module")
def server(house: House, port: int) -> Server:
    authority = house.machine.folder / "s/identity/ca.crt"
    wait_until(authority.exists)
    return Server(f"https://localhost:{port}/mcp", str(authority))


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_clients_with_a_key_are_served(house: House, server: Server, mode: str) -> None:
    key = house.make_key(f"agent-{mode}", tenant_ids=["agents"])
    async with agent_with(server, key, mode) as agent:
        assert (await call(agent, "sandbox_run", code="echo here"))["stdout"] == "here\n"


def test_without_a_key_no_user_is_served_also_on_loopback(server: Server) -> None:
    sender = Sender()
    try:
        status, headers, _ = sender.ask(server, INITIALIZE)
        assert (status, headers["WWW-Authenticate"].startswith("Bearer")) == (401, True)
        status, _, said = sender.ask(server, INITIALIZE, Host="elsewhere.example")
        assert (status, b"host_refused" in said) == (421, True)
    finally:
        sender.close()


def test_a_port_of_a_service_in_front_does_not_matter(house: House, server: Server) -> None:
    key, sender = house.make_key("behind", tenant_ids=["agents"]), Sender()
    try:
        assert sender.ask(server, INITIALIZE, key, Host="localhost:443")[0] == 200
    finally:
        sender.close()
