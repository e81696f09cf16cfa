"""An engine that has sandboxes ready by itself is told how many, and how long each session may live."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from k8e.core.model import SessionSpec
from k8e.engine import Runtime, SandboxSpec
from k8e.settings import PoolSettings
from tests.core.rig import ALICE, ManualClock, Rig, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


async def settle(rig: Rig) -> None:
    await rig.service._pool.settle()
    while rig.service._parts.tasks._tasks:
        await asyncio.wait(set(rig.service._parts.tasks._tasks))


async def test_core_says_how_many_and_makes_none(folder: Path) -> None:
    async with open_rig(folder, pool=PoolSettings(min=2, max=4)) as rig:
        rig.engine.most_ready = 1
        await rig.service.look_after()
        session = await rig.create()
        await settle(rig)
        assert list(rig.engine.wanted.values()) == [2]
        assert await rig.engine.list() == [rig.sandbox_of(session)]
        assert (await rig.service.status(ALICE)).warm == 1
        await rig.service.sessions.destroy(ALICE, session)
    assert not rig.engine.wanted  # a daemon that is stopped wants none


async def test_a_reservation_counts_what_the_engine_has_ready(folder: Path) -> None:
    async with open_rig(folder, pool=PoolSettings(min=1, max=8)) as rig:
        rig.engine.most_ready = 3
        await rig.service.look_after()
        await rig.service.warm.reserve(ALICE, "mine", SessionSpec(), 5)
        await settle(rig)
        (reservation,) = (await rig.service.warm.status(ALICE)).reservations
        assert (reservation.asked, reservation.ready) == (5, 3)


async def test_without_a_pool_what_an_earlier_daemon_wanted_is_not_wanted(folder: Path) -> None:
    async with open_rig(folder) as rig:
        rig.engine.wanted = {SandboxSpec(Runtime.NATIVE): 1}
        await rig.service.look_after()
        assert rig.engine.wanted == {}


async def test_a_session_that_is_used_may_live_longer(folder: Path) -> None:
    clock = ManualClock()
    async with open_rig(folder, clock) as rig:
        session = await rig.create(spec=SessionSpec(ttl=400))
        sandbox = rig.sandbox_of(session)
        await rig.service.look_after()
        assert rig.engine.lives.pop(sandbox) == pytest.approx(560)
        clock.advance(90)
        await rig.run(session, "true")
        await rig.service.look_after()
        assert not rig.engine.lives  # what it was told is enough
        clock.advance(90)
        await rig.run(session, "true")
        await rig.service.look_after()
        assert rig.engine.lives.pop(sandbox) == pytest.approx(560)
        clock.advance(300)
        await rig.service.look_after()
        assert not rig.engine.lives  # it was not used
        await rig.service.sessions.destroy(ALICE, session)


async def test_a_persistent_session_does_not_expire(folder: Path) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True))
        await rig.service.look_after()
        assert not rig.engine.lives
        await rig.service.sessions.destroy(ALICE, session)
