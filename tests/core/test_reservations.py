"""Sandboxes that are ready because a caller reserved them, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import PoolStatus, SessionSpec
from k8e.core.reservations import MAX_RESERVATIONS
from k8e.engine import EngineError, Limits, Mount, SandboxSpec, Shape
from k8e.settings import PoolSettings
from tests.core.rig import ALICE, BOB, Rig, fault, open_rig
from tests.core.test_pool import Gauge, count, open_pool, pool_of, settle
from tests.sandboxes import needs_root

pytestmark = needs_root
LARGE = SessionSpec(limits=Limits(memory=256 << 20))


async def look(rig: Rig) -> dict[str, tuple[int, int, int]]:
    status: PoolStatus = await rig.service.warm.status(ALICE)
    return {each.name: (each.asked, each.wanted, each.ready) for each in status.reservations}


async def test_they_are_made_and_claimed_and_made_again(folder: Path) -> None:
    async with open_pool(folder, number=1, most=4) as rig:
        status = await rig.service.warm.reserve(ALICE, "claude", LARGE, 2)
        assert (status.enabled, status.most) == (True, 4)
        await settle(rig)
        assert await look(rig) == {"claude": (2, 2, 2)}
        await rig.create(spec=LARGE)
        assert count(rig, 'k8e_pool_claims_total{start="warm"} 1')
        await settle(rig)
        assert await look(rig) == {"claude": (2, 2, 2)}
        await rig.service.warm.reserve(ALICE, "claude", LARGE, 0)
        assert await look(rig) == {}


async def test_the_machine_s_maximum_holds(folder: Path) -> None:
    async with open_pool(folder, number=1, most=2) as rig:
        await rig.service.warm.reserve(ALICE, "claude", LARGE, 5)
        await settle(rig)
        assert await look(rig) == {"claude": (5, 2, 2)}


async def test_each_caller_has_its_own(folder: Path) -> None:
    async with open_pool(folder, number=1, most=2) as rig:
        await rig.service.warm.reserve(BOB, "claude", LARGE, 1)
        assert await look(rig) == {}
        await rig.service.warm.reserve(ALICE, "claude", LARGE, 0)
        assert [each.name for each in (await rig.service.warm.status(BOB)).reservations] == ["claude"]
        await settle(rig)


async def test_what_cannot_be_made_is_said_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pool(folder) as rig:

        async def fail(spec: SandboxSpec) -> str:
            raise EngineError("runtime", "it is not on this machine")

        with fault(Kind.NOT_FOUND, "image_not_found"):
            await rig.service.warm.reserve(ALICE, "claude", SessionSpec(image="missing:1"), 1)
        monkeypatch.setattr(rig.engine, "edition", fail)
        with fault(Kind.FAILED, "sandbox_failed"):
            await rig.service.warm.reserve(ALICE, "claude", LARGE, 1)
        assert await look(rig) == {}


async def test_trouble_and_memory_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge()
    async with open_pool(folder, gauge=gauge) as rig:

        async def fail(sandbox: str, spec: SandboxSpec) -> None:
            raise EngineError("runtime", "it broke")

        with monkeypatch.context() as broken:
            broken.setattr(rig.engine, "create", fail)
            await rig.service.warm.reserve(ALICE, "claude", LARGE, 1)
            await settle(rig)
            assert (await rig.service.warm.status(ALICE)).reservations[0].trouble == "runtime: it broke"
        gauge.free = 0.01
        await rig.service.warm.reserve(ALICE, "claude", LARGE, 1)
        await pool_of(rig).review()
        await settle(rig)
        assert "free memory" in (await rig.service.warm.status(ALICE)).reservations[0].trouble


@pytest.mark.parametrize(
    ("name", "spec", "number", "field"),
    [
        ("../x", LARGE, 1, "name"),
        ("x", LARGE, -1, "count"),
        ("x", LARGE, 1000, "count"),
        ("x", SessionSpec(shape=Shape(mounts=(Mount("/srv", "/workspace", 1000),))), 1, "mounts"),
        ("x", SessionSpec(image="-v/:/host"), 1, "image"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    folder: Path, name: str, spec: SessionSpec, number: int, field: str
) -> None:
    async with open_pool(folder) as rig:
        with fault(Kind.INVALID, "invalid_argument", field):
            await rig.service.warm.reserve(ALICE, name, spec, number)


async def test_there_is_an_end_to_reserving(folder: Path) -> None:
    async with open_pool(folder, number=1, most=1) as rig:
        for number in range(MAX_RESERVATIONS):
            await rig.service.warm.reserve(ALICE, f"n{number}", LARGE, 1)
        with fault(Kind.EXHAUSTED, "too_many_reservations"):
            await rig.service.warm.reserve(ALICE, "more", LARGE, 1)
        await rig.service.warm.reserve(ALICE, "n0", LARGE, 2)
        await settle(rig)


async def test_without_a_pool_it_is_said(folder: Path) -> None:
    async with open_rig(folder, pool=PoolSettings(enabled=False), memory=Gauge()) as rig:
        with fault(Kind.UNAVAILABLE, "pool_disabled"):
            await rig.service.warm.reserve(ALICE, "claude", LARGE, 1)
        assert not (await rig.service.warm.status(ALICE)).enabled
