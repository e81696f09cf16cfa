"""Sandboxes made ahead: who gets which, when there are how many, and what a daemon's end does to them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import Phase, SessionSpec
from k8e.core.pool import quiet
from k8e.core.pool.demand import HALF_LIFE, MEMORY
from k8e.core.pool.memory import SystemMemory
from k8e.core.pool.pool import Pool
from k8e.engine import EngineError, Limits, SandboxSpec
from k8e.settings import PoolSettings
from tests.core.bare_engine import DEFAULT_HOSTS, BareEngine
from tests.core.rig import ALICE, BOB, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root


class Gauge:
    """A machine's memory, as a test wants it."""

    def __init__(self) -> None:
        self.free = 1.0

    def free_share(self) -> float:
        return self.free


def pool_of(rig: Rig) -> Pool:
    return rig.service._pool


def ready(rig: Rig) -> list[str]:
    return [name for names in pool_of(rig)._ready.values() for name in names]


async def settle(rig: Rig) -> None:
    """Until nothing is made or removed any more."""
    await pool_of(rig).settle()
    while rig.service._parts.tasks._tasks:
        await asyncio.wait(set(rig.service._parts.tasks._tasks))


def count(rig: Rig, line: str) -> bool:
    return line in rig.service.metrics.render().splitlines()


@contextlib.asynccontextmanager
async def open_pool(
    folder: Path, clock: ManualClock | None = None, *, number: int = 2, most: int = 0, gauge: Gauge | None = None
) -> AsyncIterator[Rig]:
    pool = PoolSettings(min=number, max=most or number)
    async with open_rig(folder, clock, pool=pool, memory=gauge or Gauge()) as rig:
        yield rig


async def fill(rig: Rig) -> list[str]:
    """The first session is made the slow way, and what it leads to is there."""
    session = await rig.create()
    await rig.service.sessions.destroy(ALICE, session)
    await settle(rig)
    return ready(rig)


# Claiming


async def test_the_second_session_gets_what_was_made_ahead(folder: Path) -> None:
    async with open_pool(folder) as rig:
        first = await rig.create()
        await settle(rig)
        names = ready(rig)
        assert len(names) == 2
        assert rig.sandbox_of(first) not in names
        assert (await rig.service.status(ALICE)).warm == 2
        second = await rig.create(spec=SessionSpec(session_id="second", env={"WORD": "bound"}))
        assert rig.sandbox_of(second) == names[0]
        assert (await rig.run(second, "echo $WORD $PWD")).stdout == b"bound /workspace\n"
        assert count(rig, 'k8e_pool_claims_total{start="cold"} 1')
        assert count(rig, 'k8e_pool_claims_total{start="warm"} 1')
        await settle(rig)
        assert count(rig, "k8e_pool_warm 2")
        assert count(rig, "k8e_pool_refill_seconds_count 3")


async def test_two_hundred_at_once_get_two_hundred_different_ones(folder: Path) -> None:
    async with open_pool(folder, number=200) as rig:
        names = await fill(rig)
        assert len(names) == 200
        sessions = await asyncio.gather(*(rig.create() for _ in range(200)))
        given = [rig.sandbox_of(session) for session in sessions]
        assert sorted(given) == sorted(names)
        await pool_of(rig).close()
        answers = await asyncio.gather(*(rig.run(one, f"echo {one} >> mine; cat mine") for one in sessions))
        assert [answer.stdout.decode().split() for answer in answers] == [[one] for one in sessions]


async def test_who_asks_first_is_served_first_and_the_others_do_not_wait(folder: Path) -> None:
    async with open_pool(folder, number=3) as rig:
        names = await fill(rig)
        sessions = await asyncio.gather(*(rig.create(spec=SessionSpec(session_id=f"s{n}")) for n in range(8)))
        assert [rig.sandbox_of(session) for session in sessions[:3]] == names
        assert not {rig.sandbox_of(session) for session in sessions[3:]} & set(names)
        assert count(rig, 'k8e_pool_claims_total{start="cold"} 6')


async def test_other_limits_are_another_kind(folder: Path) -> None:
    async with open_pool(folder, number=1, most=2) as rig:
        (usual,) = await fill(rig)
        spec = SessionSpec(limits=Limits(memory=2 << 30))
        first = await rig.create(spec=spec)
        await settle(rig)
        assert ready(rig) == [usual]
        await rig.create(spec=spec)
        await settle(rig)
        (other,) = set(ready(rig)) - {usual}
        third = await rig.create(spec=spec)
        assert rig.sandbox_of(third) == other
        assert rig.sandbox_of(first) not in (usual, other)


async def test_a_session_that_cannot_be_leaves_them_as_they_were(folder: Path) -> None:
    async with open_pool(folder) as rig:
        await rig.create(spec=SessionSpec(session_id="one"))
        await settle(rig)
        names = ready(rig)
        with fault(Kind.CONFLICT, "session_exists"):
            await rig.create(spec=SessionSpec(session_id="one"))
        await settle(rig)
        assert ready(rig) == names


async def test_a_dead_one_is_not_handed_out(folder: Path) -> None:
    async with open_pool(folder) as rig:
        dead, good = await fill(rig)
        rig.engine.kill_sandbox(dead)
        while (await rig.engine.observe(dead)).alive:
            await asyncio.sleep(0.001)
        session = await rig.create()
        assert rig.sandbox_of(session) == good
        await settle(rig)
        assert dead not in await rig.engine.list()
        assert len(ready(rig)) == 2
        assert count(rig, 'k8e_pool_discards_total{reason="dead"} 1')


async def test_who_leaves_while_claiming_leaves_nothing(folder: Path) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        creating = asyncio.create_task(rig.service.sessions.create(ALICE, SessionSpec(session_id="one")))
        while not len(rig.service._registry):
            await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await settle(rig)
        assert await rig.store.sessions() == [] or (await rig.store.sessions())[0].session.phase is Phase.DESTROYED
        assert names[0] not in await rig.engine.list(), "something of the session may have been in it"
        assert set(await rig.engine.list()) == set(ready(rig)) == {row.sandbox for row in await rig.store.warm()}


async def test_one_that_cannot_be_put_on_record_is_no_sessions_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)

        def refuse(connection: sqlite3.Connection) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            transact = rig.store._transact
            patch.setattr(rig.store, "_transact", lambda work: transact(refuse))
            with fault(Kind.UNAVAILABLE, "state_unavailable"):
                await rig.create()
        while names[0] in await rig.engine.list():
            await rig.service.look_after()
            await settle(rig)
        assert names[0] not in {row.sandbox for row in await rig.store.warm()}
        await rig.create()


async def test_none_is_used_twice(folder: Path) -> None:
    async with open_pool(folder) as rig:
        await fill(rig)
        seen: set[str] = set()
        for _ in range(6):
            session = await rig.create()
            sandbox = rig.sandbox_of(session)
            assert sandbox not in seen
            seen.add(sandbox)
            await rig.service.sessions.destroy(ALICE, session)
            assert sandbox not in await rig.engine.list()
            await settle(rig)


LOOK = """
id; pwd; env | sort; umask; ulimit -a; echo $$; cat /proc/self/status | grep -E '^(Cap|NoNew|Seccomp|Groups)'
for d in /workspace /tmp /run /var/tmp /home /root /dev/shm; do find $d -xdev 2>/dev/null | sort; done
for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | sed 's/[0-9a-f]\\{32\\}/INSTANCE/'; echo; done
ls /proc/self/fd; cat /proc/net/unix 2>/dev/null | wc -l; ls ~/.bash_history 2>&1; hostname
"""


async def test_a_claimed_one_looks_like_a_new_one(folder: Path) -> None:
    async with open_pool(folder) as rig:
        new = await rig.create(spec=SessionSpec(env={"A": "1"}))
        await settle(rig)
        claimed = await rig.create(spec=SessionSpec(env={"A": "1"}))
        assert count(rig, 'k8e_pool_claims_total{start="warm"} 1')
        expected, found = await rig.run(new, LOOK), await rig.run(claimed, LOOK)
        assert expected.exit_code == 0
        assert found.stdout.decode() == expected.stdout.decode()
        assert found.stderr == expected.stderr


async def test_it_may_reach_nothing_before_it_is_claimed_and_exactly_the_sessions_list_after(folder: Path) -> None:
    async with open_pool(folder, number=3) as rig:
        names = await fill(rig)
        assert [rig.engine.egress(name) for name in names] == [()] * 3
        specs = [SessionSpec(allowed_hosts=["*.one.test", "two.test"]), SessionSpec(allowed_hosts=[]), SessionSpec()]
        sessions = [await rig.create(spec=spec) for spec in specs]
        assert [rig.sandbox_of(session) for session in sessions] == names
        lists = [set(rig.engine.egress(name)) for name in names]
        assert lists == [{"*.one.test", "two.test"}, set(), set(DEFAULT_HOSTS)]


async def test_a_list_that_cannot_be_put_in_force_is_no_session(folder: Path) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        rig.engine.egress_failure = EngineError("network", "no rules")
        with fault(Kind.FAILED, "sandbox_failed"):
            await rig.create()
        rig.engine.egress_failure = None
        await settle(rig)
        assert names[0] not in await rig.engine.list()
        assert [record for record in await rig.store.sessions() if record.session.phase is not Phase.DESTROYED] == []


# Priority


async def test_nothing_is_made_ahead_while_a_caller_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_PAUSE", 0.0)
    monkeypatch.setattr(quiet, "_COURTESY", 0.0)
    async with open_pool(folder, number=4) as rig:
        order: list[str] = []
        release = asyncio.Event()
        create = rig.engine.create

        async def watch(sandbox: str, spec: SandboxSpec) -> None:
            order.append(sandbox)
            if len(order) == 2:
                await release.wait()
            await create(sandbox, spec)

        monkeypatch.setattr(rig.engine, "create", watch)
        quick = asyncio.create_task(rig.create(spec=SessionSpec(session_id="quick")))
        slow = asyncio.create_task(rig.create(ALICE, SessionSpec(session_id="slow")))
        await quick
        for _ in range(50):  # every chance to begin
            await rig.service.look_after()
        assert len(order) == 2
        release.set()
        await slow
        await settle(rig)
        assert len(ready(rig)) == 4
        assert order[2:] == ready(rig), "one after the other, and nothing else"


async def test_they_are_made_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pool(folder, number=5) as rig:
        at_once, most = 0, 0
        create = rig.engine.create

        async def watch(sandbox: str, spec: SandboxSpec) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await create(sandbox, spec)
            at_once -= 1

        monkeypatch.setattr(rig.engine, "create", watch)
        assert len(await fill(rig)) == 5
        assert most == 1


async def test_a_refill_that_fails_is_tried_again_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with open_pool(folder, clock) as rig:
        session = await rig.create()
        tries = 0

        async def refuse(sandbox: str, spec: SandboxSpec) -> None:
            nonlocal tries
            tries += 1
            raise EngineError("disk", "full")

        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "create", refuse)
            await settle(rig)
            for _ in range(5):
                await rig.service.look_after()
                await settle(rig)
            assert tries == 1
            clock.advance(1.5)
            await rig.service.look_after()
            await settle(rig)
            assert tries == 2
        assert await rig.store.warm() == []
        assert await rig.engine.list() == [rig.sandbox_of(session)]
        clock.advance(2.5)
        await rig.service.look_after()
        await settle(rig)
        assert len(ready(rig)) == 2


# Fewer


async def test_what_is_not_asked_for_any_more_is_given_back(folder: Path) -> None:
    clock = ManualClock()
    async with open_pool(folder, clock, number=1, most=6) as rig:
        sessions = [await rig.create() for _ in range(6)]
        await settle(rig)
        assert len(ready(rig)) == 6
        for elapsed, left in ((HALF_LIFE, 3), (4 * HALF_LIFE, 1), (MEMORY - 6 * HALF_LIFE, 1), (HALF_LIFE, 0)):
            clock.advance(elapsed)
            for session in sessions:
                await rig.run(session, "true")
            await rig.service.look_after()
            await settle(rig)
            assert len(ready(rig)) == left
        assert len(await rig.engine.list()) == 6
        assert await rig.store.warm() == []
        assert count(rig, 'k8e_pool_discards_total{reason="idle"} 6')


async def test_under_memory_pressure_there_are_fewer_and_none_are_made(folder: Path) -> None:
    gauge = Gauge()
    async with open_pool(folder, number=5, gauge=gauge) as rig:
        assert len(await fill(rig)) == 5
        gauge.free = 0.19
        sizes = []
        for _ in range(4):
            await rig.service.look_after()
            await settle(rig)
            sizes.append(len(ready(rig)))
            assert len(await rig.engine.list()) == sizes[-1]
        assert sizes == [2, 1, 0, 0]
        assert count(rig, 'k8e_pool_discards_total{reason="memory"} 5')
        session = await rig.create()  # a session that a caller asks for is made all the same
        await settle(rig)
        assert ready(rig) == []
        gauge.free = 0.22  # enough not to give any back, not enough to make one
        await rig.service.look_after()
        await settle(rig)
        assert ready(rig) == []
        gauge.free = 0.5
        await rig.service.look_after()
        await settle(rig)
        assert len(ready(rig)) == 5
        assert (await rig.run(session, "echo here")).stdout == b"here\n"


async def test_what_is_claimed_while_others_are_given_back_is_whole(folder: Path) -> None:
    gauge = Gauge()
    async with open_pool(folder, number=12, gauge=gauge) as rig:
        names = await fill(rig)
        gauge.free = 0.0
        creating = [asyncio.create_task(rig.create(BOB)) for _ in range(3)]
        reviewing = [asyncio.create_task(rig.service.look_after()) for _ in range(3)]
        creating += [asyncio.create_task(rig.create(BOB)) for _ in range(3)]
        sessions = await asyncio.gather(*creating)
        await asyncio.gather(*reviewing)
        await settle(rig)
        given = [rig.sandbox_of(session) for session in sessions]
        assert len(set(given)) == 6
        assert set(given) & set(names)
        for session in sessions:
            assert (await rig.run(session, "echo whole", BOB)).stdout == b"whole\n"
        assert set(await rig.engine.list()) == {*given, *ready(rig)}


async def test_one_that_cannot_be_destroyed_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge()
    async with open_pool(folder, number=1, gauge=gauge) as rig:
        (name,) = await fill(rig)

        async def refuse(sandbox: str) -> None:
            raise EngineError("cgroup", "busy")

        gauge.free = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "destroy", refuse)
            await rig.service.look_after()
            await settle(rig)
        assert [(row.sandbox, row.ready) for row in await rig.store.warm()] == [(name, False)]
        assert ready(rig) == []
        await rig.service.look_after()
        await settle(rig)
        assert await rig.store.warm() == []
        await rig.assert_no_trace()


# A daemon that is stopped


async def test_a_daemon_that_is_stopped_leaves_none_running(folder: Path) -> None:
    async with open_pool(folder) as rig:
        session = await rig.create()
        await settle(rig)
        assert len(ready(rig)) == 2
        await rig.service.close()
        assert await rig.engine.list() == [rig.sandbox_of(session)]
        assert await rig.store.warm() == []
        assert count(rig, 'k8e_pool_discards_total{reason="stopped"} 2')


async def test_nor_those_of_an_earlier_one_that_it_has_not_looked_at_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        forget(rig)
    looking, never = asyncio.Event(), asyncio.Event()

    async def look(self: BareEngine, spec: SandboxSpec) -> str:
        looking.set()
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(BareEngine, "edition", look)
    async with open_pool(folder) as rig:
        await looking.wait()
        assert set(names) <= set(await rig.engine.list())
        await rig.service.close()
        await rig.assert_no_trace()
        assert await rig.store.warm() == []


# The next daemon after one that was killed


def forget(rig: Rig) -> None:
    """As a daemon that is killed leaves them: running, and on record."""
    pool_of(rig)._ready.clear()


async def test_the_next_daemon_goes_on_with_them(folder: Path) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        forget(rig)
    async with open_pool(folder) as rig:
        await settle(rig)
        assert ready(rig) == names
        session = await rig.create(spec=SessionSpec(env={"A": "1"}))
        assert rig.sandbox_of(session) == names[0]
        assert (await rig.run(session, "echo $A")).stdout == b"1\n"
        assert names[0] not in {row.sandbox for row in await rig.store.warm()}
    async with open_pool(folder) as rig:
        assert (await rig.run(session, "echo $A")).stdout == b"1\n"


async def test_the_next_daemon_does_not_take_over_what_is_made_of_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        forget(rig)
    monkeypatch.setattr(BareEngine, "made_of", "another agent")
    async with open_pool(folder) as rig:
        await settle(rig)
        assert not set(await rig.engine.list()) & set(names)
        assert count(rig, 'k8e_pool_discards_total{reason="outdated"} 2')


async def test_the_next_daemon_removes_those_that_died(folder: Path) -> None:
    async with open_pool(folder) as rig:
        names = await fill(rig)
        rig.engine.kill_sandbox(names[0])
        forget(rig)
    async with open_pool(folder) as rig:
        await settle(rig)
        assert names[0] not in await rig.engine.list()
        assert names[1] in ready(rig)


async def test_the_next_daemon_without_a_pool_removes_them_all(folder: Path) -> None:
    async with open_pool(folder) as rig:
        await fill(rig)
        forget(rig)
    async with open_rig(folder) as rig:
        await rig.assert_no_trace()
        assert await rig.store.warm() == []


async def test_a_daemon_that_is_stopped_leaves_no_half_made_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pool(folder) as rig:
        begun = asyncio.Event()
        create = rig.engine.create
        session = await rig.create()

        async def watch(sandbox: str, spec: SandboxSpec) -> None:
            begun.set()
            await create(sandbox, spec)

        monkeypatch.setattr(rig.engine, "create", watch)
        await begun.wait()
        mine = rig.sandbox_of(session)
        await rig.service.close()
        assert await rig.engine.list() == [mine]
        assert await rig.store.warm() == []


async def test_prewarm_needs_no_request(folder: Path) -> None:
    settings = PoolSettings(min=2, max=2, prewarm=True)
    async with open_rig(folder, pool=settings, memory=Gauge()) as rig:
        rig.service.keep_up(1000)
        while len(ready(rig)) < 2:
            await asyncio.sleep(0.01)
        assert rig.sandbox_of(await rig.create()) in await rig.engine.list()
        assert count(rig, 'k8e_pool_claims_total{start="warm"} 1')


# Memory


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({}, 0.5),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 0.5),
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 1\ninactive_file 100\n"}, 0.2),
        ({"memory.max": "1000\n", "memory.current": "2000\n", "memory.stat": "inactive_file 0\n"}, 0.0),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "700\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            0.35,
        ),
        (
            {
                "memory/here/memory.limit_in_bytes": "1000\n",
                "memory/here/memory.usage_in_bytes": "900\n",
                "memory/here/memory.stat": "",
            },
            0.1,
        ),
        ({"here/memory.max": "100\n", "here/memory.current": "70\n", "here/memory.stat": ""}, 0.3),
    ],
)
def test_the_scarcest_memory_counts(tmp_path: Path, files: dict[str, str], share: float) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\n")
    (proc / "self/cgroup").write_text("4:cpu,memory:/here\n1:name=systemd:/other\n0::/here\n")
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content)
    assert SystemMemory(proc, groups).free_share() == pytest.approx(share)


def test_this_machines_memory_can_be_read() -> None:
    assert 0 < SystemMemory().free_share() <= 1
