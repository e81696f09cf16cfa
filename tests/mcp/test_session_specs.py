"""From a tool call to its session, where a test from outside cannot show it: a registry out of reach, and what the same
options mean with either toolset."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.tools.session_specs import NO_FOLDERS, ClientFolders, ResolvedSpec, SpecResolver
from k8e.doors.mcp.toolsets import AGENTKERNEL, K8E
from k8e.engine import EngineError
from k8e.engine.images import Credentials, Image, Report
from tests.core.rig import Rig, open_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
def client(rig: Rig) -> McpClient:
    return McpClient(rig.service, Caller(0), known=True)


async def resolve(specs: SpecResolver, client: McpClient, *command: str, **options: Any) -> ResolvedSpec:
    return await specs.resolve(client, Fields(options), None, command)


async def test_a_detected_image_is_replaced_and_its_registry_left_alone(
    rig: Rig, client: McpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def pull(reference: str, credentials: Credentials | None, report: Report) -> Image:
        asked.append(reference)
        raise EngineError("image", "no answer", reason="unreachable")

    monkeypatch.setattr(rig.engine.images, "pull", pull)
    specs = SpecResolver(AGENTKERNEL, NO_FOLDERS)
    for _ in range(2):
        resolved = await resolve(specs, client, "python3", "-c", "1", network=False)
        assert (resolved.spec.image, resolved.asked_image) == ("host", False)
        assert "no answer" in resolved.notes[0]
    assert len(asked) == 1  # it is not asked again for a while
    with pytest.raises(Fault) as failed:  # which this machine cannot replace
        await resolve(specs, client, "/opt/none/python3", network=False)
    assert failed.value.code == "registry_unreachable"
    with pytest.raises(Fault) as failed:  # and says which image is missing, not which one was before
        await resolve(specs, client, "/opt/none/cargo", network=False)
    assert "rust:" in failed.value.error
    assert failed.value.hint
    with pytest.raises(Fault) as failed:  # what was asked for by name is never replaced, and always tried
        await resolve(specs, client, "python3", image="python:3.12-alpine", network=False)
    assert (failed.value.code, failed.value.field) == ("registry_unreachable", "image")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("toolset", "options", "hosts", "more"),
    [
        (K8E, {}, None, ()),
        (K8E, {"profile": "moderate"}, None, ()),
        (K8E, {"network": True}, None, ()),
        (K8E, {"network": False}, [], ()),
        (K8E, {"profile": "restrictive"}, [], ()),
        (K8E, {"compatibility_mode": "native"}, ["*"], ()),
        (K8E, {"compatibility_mode": "gemini"}, None, ("*.googleapis.com",)),
        (AGENTKERNEL, {}, ["*"], ()),
        (AGENTKERNEL, {"compatibility_mode": "claude"}, None, ("api.anthropic.com", "cdn.anthropic.com")),
        (AGENTKERNEL, {"compatibility_mode": "claude", "network": False}, [], ()),
    ],
)
async def test_what_a_call_may_reach_with_either_toolset(
    client: McpClient,
    tmp_path: Path,
    toolset: Any,
    options: dict[str, Any],
    hosts: list[str] | None,
    more: tuple[str, ...],
) -> None:
    """k8e has its own default list of hosts."""
    folders = ClientFolders(str(tmp_path), "/home/nobody")
    resolved = await resolve(SpecResolver(toolset, folders), client, "id", image="host", **options)
    assert (resolved.spec.allowed_hosts, tuple(resolved.spec.more_hosts)) == (hosts, more)


async def test_where_there_is_no_folder_there_is_no_project(client: McpClient) -> None:
    with pytest.raises(Fault) as refused:
        await resolve(SpecResolver(K8E, NO_FOLDERS), client, "id", compatibility_mode="claude")
    assert (refused.value.code, refused.value.field) == ("no_project", "compatibility_mode")
