"""What one payer may have, and whose turn it is."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from k8e.core.access.access import Payer
from k8e.core.access.turns import Turns
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, RunSpec, SessionSpec
from k8e.core.sessions.quotas import TenantShare, measure_share
from k8e.engine import Limits, Room
from k8e.settings import QuotasSettings, Settings
from tests.core.rig import ALICE, BOB, ManualClock, Rig, open_rig

RED, BLUE = Caller(REMOTE, "red", name="r"), Caller(REMOTE, "blue", name="b")
A, B, C = Payer(REMOTE, "a"), Payer(REMOTE, "b"), Payer(REMOTE, "c")


def limit(**quotas: float) -> Settings:
    return Settings(quotas=QuotasSettings(**quotas))  # type: ignore[arg-type]


async def test_tenants_pay_each_for_themselves_and_a_local_user_for_all_their_tenants(folder: Path) -> None:
    async with open_rig(folder, settings=limit(sessions=1)) as rig:
        await rig.service.sessions.create(RED, SessionSpec())
        await rig.service.sessions.create(BLUE, SessionSpec())
        await rig.service.sessions.create(ALICE, SessionSpec(tenant="one"))
        for caller, spec in ((RED, SessionSpec()), (ALICE, SessionSpec(tenant="two"))):
            with pytest.raises(Fault) as refused:
                await rig.service.sessions.create(caller, spec)
            assert (refused.value.kind, refused.value.code) == (Kind.EXHAUSTED, "too_many_sessions")
            assert refused.value.retry_after > 0


@pytest.mark.parametrize(
    ("settings", "limits", "code"),
    [
        (limit(cpus=1.5), Limits(cpus=1.0), "too_many_cpus"),
        (limit(memory=768 << 20), Limits(memory=512 << 20), "too_much_memory"),
    ],
)
async def test_limits_of_sessions_add_up(folder: Path, settings: Settings, limits: Limits, code: str) -> None:
    async with open_rig(folder, settings=settings) as rig:
        first = await rig.service.sessions.create(ALICE, SessionSpec(limits=limits))
        with pytest.raises(Fault) as refused:
            await rig.service.sessions.create(ALICE, SessionSpec(limits=limits))
        assert refused.value.code == code
        await rig.service.sessions.create(BOB, SessionSpec(limits=limits))
        await rig.service.sessions.destroy(ALICE, first.session_id)
        await rig.service.sessions.create(ALICE, SessionSpec(limits=limits))


@pytest.mark.parametrize(
    ("share", "code", "key"),
    [
        (TenantShare(cpus=1.8), "too_many_cpus", "cpus"),
        (TenantShare(memory=3 << 29), "too_much_memory", "memory"),
        (TenantShare(disk=3 << 30), "too_much_disk", "disk"),
    ],
)
async def test_a_tenant_has_a_share_of_an_exposed_machine(
    folder: Path, share: TenantShare, code: str, key: str
) -> None:
    """Each tenant one of their own; users of the machine have no limit, and before doors listen no tenant has one."""
    async with open_rig(folder) as rig:
        await rig.service.sessions.create(RED, SessionSpec())
        kept = (await rig.service.sessions.create(RED, SessionSpec())).session_id
        await rig.service.sessions.destroy(RED, kept)
        rig.service._quotas.expose(share)
        with pytest.raises(Fault) as refused:
            await rig.service.sessions.create(RED, SessionSpec())
        assert (refused.value.kind, refused.value.code) == (Kind.EXHAUSTED, code)
        assert "a tenant of the gateway has" in refused.value.detail
        assert f"{key} of [quotas] in k8e.toml" in refused.value.hint
        await rig.service.sessions.create(BLUE, SessionSpec())
        for _ in range(3):
            await rig.service.sessions.create(ALICE, SessionSpec())


@pytest.mark.parametrize("most", [0, 64])
async def test_what_the_settings_say_goes_before_the_share(folder: Path, most: int) -> None:
    settings = limit(cpus=most, memory=most << 30, disk=most << 30)
    async with open_rig(folder, settings=settings) as rig:
        rig.service._quotas.expose(TenantShare(0.1, 1 << 20, 1 << 20))
        for _ in range(2):
            await rig.service.sessions.create(RED, SessionSpec())


async def test_the_share_is_this_machines(folder: Path) -> None:
    share = measure_share(folder)
    assert share.cpus == 2 * len(os.sched_getaffinity(0))
    assert 0 < share.memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert 0 < share.disk <= shutil.disk_usage(folder).total // 2


def test_the_share_of_a_cluster_is_not_this_machines() -> None:
    share = measure_share(None, Room(cpus=400.0, memory=1 << 40, disk=3 << 40))
    assert (share.cpus, share.memory, share.disk, share.of) == (800.0, 1 << 39, 3 << 39, "cluster")


async def test_who_creates_too_quickly_is_told_when_to_come_back(folder: Path) -> None:
    clock = ManualClock()
    async with open_rig(folder, clock, settings=limit(creates_per_minute=2)) as rig:
        await rig.service.sessions.create(RED, SessionSpec())
        await rig.service.sessions.create(RED, SessionSpec())
        with pytest.raises(Fault) as refused:
            await rig.service.sessions.create(RED, SessionSpec())
        assert refused.value.code == "too_many_creates"
        await rig.service.sessions.create(BLUE, SessionSpec())
        clock.advance(refused.value.retry_after)
        await rig.service.sessions.create(RED, SessionSpec())


async def test_the_next_daemon_knows_who_created_lately(folder: Path) -> None:
    clock = ManualClock()
    settings = limit(creates_per_minute=2)
    async with open_rig(folder, clock, settings=settings) as rig:
        for _ in range(2):
            await rig.service.sessions.create(RED, SessionSpec())
    clock.advance(10)
    async with open_rig(folder, clock, settings=settings) as rig:
        with pytest.raises(Fault) as refused:
            await rig.service.sessions.create(RED, SessionSpec())
        assert refused.value.code == "too_many_creates"
        assert refused.value.retry_after == pytest.approx(20)
        await rig.service.sessions.create(BLUE, SessionSpec())
        clock.advance(21)
        await rig.service.sessions.create(RED, SessionSpec())


async def test_runs_at_the_same_time_are_counted_in_the_background_too(folder: Path) -> None:
    async with open_rig(folder, settings=limit(concurrent_runs=2)) as rig:
        session = await rig.create()
        waiting = await rig.service.runs.start(ALICE, RunSpec(session, "cat"))
        background = await rig.service.runs.run(ALICE, RunSpec(session, "sleep 60", background=True))
        for again in (False, True):
            with pytest.raises(Fault) as refused:
                await rig.service.runs.run(ALICE, RunSpec(session, "true", background=again))
            assert (refused.value.code, refused.value.retry_after) == ("too_many_runs", 1.0)
        other = await rig.create(BOB)
        assert (await rig.service.runs.run(BOB, RunSpec(other, "true"))).exit_code == 0
        await waiting.close_stdin()
        await waiting.result()
        assert (await rig.service.runs.run(ALICE, RunSpec(session, "true"))).exit_code == 0
        await rig.service.runs.kill(ALICE, background.run_id)
        held = await rig.service.runs.start(ALICE, RunSpec(session, "cat"))
        assert (await rig.service.runs.run(ALICE, RunSpec(session, "true"))).exit_code == 0
        await held.close_stdin()
        await held.result()


async def test_a_run_that_does_not_start_is_not_counted(folder: Path) -> None:
    async with open_rig(folder, settings=limit(concurrent_runs=1)) as rig:
        session = await rig.create()
        for _ in range(3):
            with pytest.raises(Fault) as refused:
                await rig.service.runs.run(ALICE, RunSpec(session, argv=(b"/nowhere",)))
            assert refused.value.code == "program_not_found"
            for background in (False, True):
                with pytest.raises(Fault) as refused:
                    await rig.service.runs.run(ALICE, RunSpec(session, "true", user="nobody", background=background))
                assert refused.value.code == "user_not_found"
        assert (await rig.service.runs.run(ALICE, RunSpec(session, "true"))).exit_code == 0


async def test_a_sandbox_is_asked_for_a_user_only_within_the_quota(folder: Path) -> None:
    async with open_rig(folder, settings=limit(concurrent_runs=1)) as rig:
        session = await rig.create()
        held = await rig.service.runs.start(ALICE, RunSpec(session, "cat"))
        for background in (False, True):
            with pytest.raises(Fault) as refused:
                await rig.service.runs.run(ALICE, RunSpec(session, "true", user="nobody", background=background))
            assert refused.value.code == "too_many_runs"
        await held.close_stdin()
        await held.result()


class Crowd:
    """People who take a place, say so, and leave when told."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.order: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, payer: Payer, name: str) -> None:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._wait(payer, name))
        await asyncio.sleep(0)

    async def _wait(self, payer: Payer, name: str) -> None:
        async with self.turns.take(payer):
            self.order.append(name)
            await self.leave[name].wait()

    async def go(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


async def test_queues_take_turns() -> None:
    crowd = Crowd(Turns(1))
    for name in ("a1", "a2", "a3", "a4"):
        await crowd.come(A, name)
    await crowd.come(B, "b1")
    await crowd.come(C, "c1")
    for name in ("a1", "a2", "b1", "c1", "a3", "a4"):
        assert crowd.order[-1] == name
        await crowd.go(name)
    assert len(crowd.order) == 6


async def test_no_payer_has_more_than_its_share_of_the_places() -> None:
    crowd = Crowd(Turns(4, each=2))
    for name in ("a1", "a2", "a3"):
        await crowd.come(A, name)
    await crowd.come(B, "b1")
    assert crowd.order == ["a1", "a2", "b1"]
    await crowd.go("b1")
    assert crowd.order == ["a1", "a2", "b1"]
    await crowd.go("a1")
    assert crowd.order[-1] == "a3"
    for name in ("a2", "a3"):
        await crowd.go(name)


async def test_who_leaves_the_queue_takes_no_place_with_them() -> None:
    crowd = Crowd(Turns(1))
    for name in ("a1", "a2", "a3"):
        await crowd.come(A, name)
    crowd.tasks["a2"].cancel()
    crowd.leave["a1"].set()
    await crowd.tasks["a1"]
    crowd.leave["a3"].set()
    await crowd.tasks["a3"]
    # Called, and gone before it could come.
    await crowd.come(A, "a4")
    await crowd.come(A, "a5")
    crowd.leave["a4"].set()
    while not crowd.tasks["a4"].done():
        await asyncio.sleep(0)
    crowd.tasks["a5"].cancel()
    await asyncio.sleep(0)
    await crowd.come(B, "b1")
    assert crowd.order[-1] == "b1"
    await crowd.go("b1")


async def test_a_flood_of_commands_waits_behind_itself(rig: Rig) -> None:
    flooded, quiet = await rig.create(ALICE), await rig.create(BOB)
    ended: list[str] = []

    async def run(caller: Caller, session: str, name: str) -> None:
        await rig.service.runs.run(caller, RunSpec(session, argv=(b"true",)))
        ended.append(name)

    flood = [asyncio.create_task(run(ALICE, flooded, "alice")) for _ in range(300)]
    await asyncio.sleep(0)  # all of them have asked
    await run(BOB, quiet, "bob")
    assert ended.index("bob") < 150
    await asyncio.gather(*flood)
    assert ended.count("alice") == 300
