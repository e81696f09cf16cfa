"""The newest protocol over HTTP has no connections: a session is found by its handle, and one that no client can find
any more ends soon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from mcp import Client
from mcp_types.version import LATEST_MODERN_VERSION

from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, Session, SessionSpec
from k8e.doors.mcp.clients import StatelessClient
from k8e.doors.mcp.handles import UNUSED, Handles
from k8e.doors.mcp.resources import OutputResources
from k8e.settings import QuotasSettings, Settings
from tests.cli.machine import Machine, wait_until
from tests.core.rig import Rig, open_rig
from tests.mcp.agents import call, fail, stdio_agent
from tests.mcp.test_http import browsing, listening, read_event

PROMISE = "are there at the next call"
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": LATEST_MODERN_VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1.0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


@pytest.fixture(scope="module")
def url(machine: Machine) -> Iterator[str]:
    with listening(machine) as made:
        yield made


async def read_texts(client: Client) -> dict[str, str]:
    """All that a model reads of each tool."""
    tools = (await client.list_tools()).tools
    schemas = {tool.name: json.dumps(tool.input_schema, sort_keys=True) for tool in tools}
    return {tool.name: f"{tool.description} {schemas[tool.name]}" for tool in tools}


async def test_the_tools_say_how_a_session_is_found_again(machine: Machine, url: str) -> None:
    async with Client(url, mode="legacy") as connected, Client(url, mode="auto") as stateless:
        assert stateless.protocol_version == LATEST_MODERN_VERSION
        kept, found = await read_texts(connected), await read_texts(stateless)
        assert connected.instructions
        assert stateless.instructions
        assert ("session_id" in connected.instructions, "session_id" in stateless.instructions) == (False, True)
    assert PROMISE in kept["sandbox_run"]
    assert "default session" in kept["sandbox_write_file"]
    for name, text in found.items():
        assert PROMISE not in text, name
        assert "default session" not in text, name
        assert "this connection" not in text, name
    assert "session_id is in the answer" in found["sandbox_run"]
    # Without a connection a name cannot be chosen, and nothing is listed.
    assert kept.keys() - found.keys() == {"sandbox_create", "sandbox_start", "sandbox_stop", "sandbox_list"}
    assert "session_id" not in found["sandbox_create_session"].partition("{")[2]
    with listening(machine, "--tenant-id", "web") as tenant_url:
        async with Client(tenant_url, mode="auto") as of_tenant:
            shared = await read_texts(of_tenant)
    assert PROMISE in shared["sandbox_run"]
    assert "ends with this connection" not in shared["sandbox_create_session"]
    async with stdio_agent(machine, mode="auto") as piped:
        assert await read_texts(piped) == kept, "a bridge is a connection in every version"


async def test_a_model_that_uses_its_handle_has_one_sandbox_for_many_calls(machine: Machine, url: str) -> None:
    async with Client(url, mode="auto") as agent:
        first = await call(agent, "sandbox_run", code="echo 0 > count")
        handle = first["session_id"]
        [note] = first["notes"]
        assert handle in note
        for _ in range(13):
            run = await call(
                agent, "sandbox_run", session_id=handle, code="echo $(($(cat count) + 1)) > count; cat count"
            )
            assert (run["session_id"], "notes" in run) == (handle, False)
        assert (await call(agent, "sandbox_run", session_id=handle, code="cat count"))["stdout"] == "13\n"
        assert machine.live_sessions() == [handle]
        written = await call(agent, "sandbox_write_file", path="a", content="b")
        assert written["session_id"] in written["notes"][0]
        await call(agent, "sandbox_destroy_session", session_id=written["session_id"])
        await call(agent, "sandbox_destroy_session", session_id=handle)
        gone = await fail(agent, "sandbox_run", session_id=handle, code="true")
        assert gone["code"] == "session_not_found"
        assert "sandbox_list" not in gone["hint"]


def test_a_session_whose_handle_was_not_delivered_ends_at_once(machine: Machine, url: str) -> None:
    params = {
        "name": "sandbox_run",
        "arguments": {"code": "echo on; sleep 875", "timeout": 1000},
        "_meta": {"progressToken": 1, **ENVELOPE},
    }
    with browsing(url) as browser:
        headers = {"Mcp-Protocol-Version": LATEST_MODERN_VERSION, "Mcp-Method": "tools/call", "Mcp-Name": "sandbox_run"}
        running = browser.send("POST", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, **headers)
        assert running.status == 200, running.read()
        while "on\\n" not in read_event(running)[1]:
            pass
        assert len(machine.live_sessions()) == 1
        browser.leave(running)
    wait_until(lambda: machine.live_sessions() == [])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        yield rig


async def test_a_handle_that_no_call_uses_ends_within_minutes(rig: Rig) -> None:
    assert UNUSED <= 300
    tasks: set[asyncio.Task[None]] = set()
    handles = Handles(rig.service, lambda work: tasks.add(asyncio.create_task(work)), unused=0.05)

    async def make() -> str:
        client = StatelessClient(rig.service, Caller(0), handles, OutputResources(shared=True))
        session = await client.create(SessionSpec())
        client.leave(answered=True)
        return session.session_id

    async def live() -> set[str]:
        return {each.session_id for each in await rig.service.sessions.list(Caller(0))}

    unused = [await make() for _ in range(3)]
    used = await make()
    other = StatelessClient(rig.service, Caller(0), handles, OutputResources(shared=True))
    assert await other.use(used, lambda name: asyncio.sleep(0, name)) == used
    other.leave(answered=True)
    async with asyncio.timeout(60):
        while await live() != {used}:
            await asyncio.sleep(0.01)
    assert used not in unused
    await handles.close()
    assert await live() == set()
    await asyncio.gather(*tasks)


async def test_a_session_that_is_refused_leaves_no_handle(tmp_path: Path) -> None:
    async with open_rig(tmp_path, settings=Settings(quotas=QuotasSettings(sessions=1))) as rig:
        tasks: list[asyncio.Task[None]] = []
        handles = Handles(rig.service, lambda work: tasks.append(asyncio.create_task(work)))
        client = StatelessClient(rig.service, Caller(0), handles, OutputResources(shared=True))
        made = await client.create(SessionSpec())
        for _ in range(3):
            other = StatelessClient(rig.service, Caller(0), handles, OutputResources(shared=True))
            with pytest.raises(Fault) as refused:
                await other.create(SessionSpec())
            assert refused.value.code == "too_many_sessions"
            other.leave(answered=True)
        client.leave(answered=True)
        assert list(handles._handles) == [made.tenant]
        await asyncio.gather(*tasks)
        await handles.close()
        assert await rig.service.sessions.list(Caller(0)) == []


async def test_a_session_that_cannot_be_looked_for_is_looked_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[asyncio.Task[None]] = []
    handles = Handles(rig.service, lambda work: tasks.append(asyncio.create_task(work)))
    client = StatelessClient(rig.service, Caller(0), handles, OutputResources(shared=True))
    made = await client.create(SessionSpec())
    client.leave(answered=True)
    await client.use(made.session_id, lambda name: asyncio.sleep(0, name))
    handle = handles._handles[made.tenant]
    first = handle.timer
    broken = Fault(Kind.UNAVAILABLE, "state_unavailable", "the database cannot be read", hint="Try again.")

    async def fail_to_list(caller: Caller) -> list[Session]:
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.service.sessions), "list", lambda _, caller: fail_to_list(caller))
        handles._end(made.tenant, handle)
        await asyncio.gather(*tasks)
    assert handle.timer is not None
    assert handle.timer is not first
    await handles.close()
