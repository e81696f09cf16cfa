"""From what an agent asks for to what it gets, where that cannot be shown from outside: a registry that nobody reaches,
and what the same wish means under either name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Fault
from k8e.core.model import Caller
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.cages import Cages, Made
from k8e.doors.mcp.fronts import AGENTKERNEL, K8E, NOWHERE, Surroundings
from k8e.doors.mcp.guest import Guest
from k8e.engine import EngineError
from k8e.engine.images import Credentials, Image, Report
from tests.core.rig import Rig, open_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
def guest(rig: Rig) -> Guest:
    return Guest(rig.service, Caller(0), known=True)


async def choose(cages: Cages, guest: Guest, *command: str, **wishes: Any) -> Made:
    return await cages.choose(guest, Fields(wishes), None, command)


async def test_an_image_that_nobody_asked_for_is_replaced_and_its_registry_left_alone(
    rig: Rig, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def pull(reference: str, credentials: Credentials | None, report: Report) -> Image:
        asked.append(reference)
        raise EngineError("image", "nobody answers", reason="unreachable")

    monkeypatch.setattr(rig.engine.images, "pull", pull)
    cages = Cages(AGENTKERNEL, NOWHERE)
    for _ in range(2):
        made = await choose(cages, guest, "python3", "-c", "1", network=False)
        assert (made.spec.image, made.asked_image) == ("host", False)
        assert "nobody answers" in made.notes[0]
    assert len(asked) == 1  # it is not asked again for a while
    with pytest.raises(Fault) as failed:  # which this machine cannot replace
        await choose(cages, guest, "/opt/none/python3", network=False)
    assert failed.value.code == "registry_unreachable"
    with pytest.raises(Fault) as failed:  # and says which image is missing, not which one was before
        await choose(cages, guest, "/opt/none/cargo", network=False)
    assert "rust:" in failed.value.error
    assert failed.value.hint
    with pytest.raises(Fault) as failed:  # what was asked for by name is never replaced, and always tried
        await choose(cages, guest, "python3", image="python:3.12-alpine", network=False)
    assert (failed.value.code, failed.value.field) == ("registry_unreachable", "image")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("front", "wishes", "hosts", "more"),
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
async def test_what_a_wish_may_reach_under_either_name(
    guest: Guest, tmp_path: Path, front: Any, wishes: dict[str, Any], hosts: list[str] | None, more: tuple[str, ...]
) -> None:
    """k8e's usual list is a promise of its own; agentkernel says what it says."""
    around = Surroundings(str(tmp_path), "/home/nobody")
    made = await choose(Cages(front, around), guest, "id", image="host", **wishes)
    assert (made.spec.allowed_hosts, tuple(made.spec.more_hosts)) == (hosts, more)


async def test_where_there_is_no_folder_there_is_no_project(guest: Guest) -> None:
    with pytest.raises(Fault) as refused:
        await choose(Cages(K8E, NOWHERE), guest, "id", compatibility_mode="claude")
    assert (refused.value.code, refused.value.field) == ("no_project", "compatibility_mode")
