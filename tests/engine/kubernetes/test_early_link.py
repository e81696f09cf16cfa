"""A link that is opened before its pod is certain: it is used for that pod only, and closed when it is not used."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.early_link import EarlyLink
from k8e.engine.kubernetes.names import AGENT_KEY
from k8e.link import AgentLink
from k8e.link.errors import LinkLost
from tests.engine.kubernetes.pods import make_pod


class Agents:
    """Dials, and counts."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.closed: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.broken = 0

    async def open(self, pod: Pod) -> AgentLink:
        assert pod.metadata is not None
        self.dialled.append(pod.metadata.uid or "")
        await self.answers.wait()
        if self.broken:
            self.broken -= 1
            raise LinkLost("no answer")
        return cast(AgentLink, Link(self, pod.metadata.uid or ""))


class Link:
    def __init__(self, agents: Agents, uid: str) -> None:
        self.uid = uid
        self._agents = agents

    async def close(self) -> None:
        self._agents.closed.append(self.uid)


def greeted(uid: str) -> Pod:
    pod = make_pod(uid=uid)
    assert pod.metadata is not None
    pod.metadata.annotations = {AGENT_KEY: "00"}
    return pod


async def take(early: EarlyLink, pod: Pod) -> str:
    link: Any = await early.take(pod)
    return str(link.uid)


async def test_the_early_one_is_used_and_stays_open() -> None:
    agents = Agents()
    early = EarlyLink(agents.open)
    early.begin(greeted("u1"))
    early.begin(greeted("u1"))
    assert await take(early, greeted("u1")) == "u1"
    await early.close()
    assert (agents.dialled, agents.closed) == (["u1"], [])


async def test_another_pods_is_closed() -> None:
    agents = Agents()
    early = EarlyLink(agents.open)
    early.begin(greeted("u1"))
    await asyncio.sleep(0)
    assert await take(early, greeted("u2")) == "u2"
    assert (agents.dialled, agents.closed) == (["u1", "u2"], ["u1"])


async def test_a_pod_whose_key_is_not_known_is_not_dialled() -> None:
    agents = Agents()
    early = EarlyLink(agents.open)
    early.begin(make_pod(uid="u1"))
    await asyncio.sleep(0)
    assert agents.dialled == []
    assert await take(early, make_pod(uid="u1")) == "u1"


async def test_one_that_failed_is_tried_again_once_it_is_certain() -> None:
    agents = Agents()
    agents.broken = 1
    early = EarlyLink(agents.open)
    early.begin(greeted("u1"))
    assert await take(early, greeted("u1")) == "u1"
    assert agents.dialled == ["u1", "u1"]
    agents.broken = 2
    early = EarlyLink(agents.open)
    early.begin(greeted("u1"))
    with pytest.raises(LinkLost):
        await early.take(greeted("u1"))


async def test_one_that_is_not_taken_is_given_up() -> None:
    agents = Agents()
    early = EarlyLink(agents.open)
    early.begin(greeted("u1"))
    await asyncio.sleep(0)
    await early.close()
    assert agents.closed == ["u1"]
    agents.answers.clear()
    early = EarlyLink(agents.open)
    early.begin(greeted("u2"))
    taking = asyncio.create_task(early.take(greeted("u2")))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert agents.dialled == ["u1", "u2"]
