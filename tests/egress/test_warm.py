"""A sandbox that was made ahead may reach nothing, and once it is a session's exactly what that session's list says."""

from __future__ import annotations

from pathlib import Path

from k8e.core.model import Caller, SessionSpec
from k8e.core.service import Service
from k8e.core.store.store import Store
from k8e.settings import PoolSettings
from tests.egress.rig import Attempt, Site
from tests.egress.zones import Zone
from tests.engine.rig import LIMITS

ROOT = Caller(0)
ZONE: Zone = {"one.com": {"A": ["45.90.31.1"]}, "two.com": {"A": ["45.90.31.2"]}}
TRIES: list[Attempt] = [
    *(("tcp", "one.com", 80), ("tcp", "two.com", 80)),
    *(("tcp", "45.90.31.1", 80), ("tcp", "45.90.31.2", 80), ("tcp", "45.90.50.5", 80)),
]


async def test_a_claimed_sandbox_has_its_sessions_list_and_nothing_else(site: Site, tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "k8e.db")
    service = Service(site.engine, store, pool=PoolSettings(min=3, max=3))
    pool = service._pool
    try:
        for _ in range(2):  # a kind that is not the usual one is made ahead when it was asked for twice
            await service.sessions.create(ROOT, SessionSpec(runtime=site.runtime, limits=LIMITS, allowed_hosts=[]))
        await pool.settle()
        (names,) = ([*waiting] for waiting in pool._ready.values())
        site.internet.clear()
        warm = await site.enter(names[0])
        nothing = await warm.reached(*TRIES)
        assert all(isinstance(each, str) and each.startswith("!") for each in nothing)
        assert not {address for _, address, _ in site.internet.notes().packets} & {"45.90.31.1", "45.90.31.2"}
        lists: tuple[list[str], ...] = (["one.com"], ["two.com", "45.90.50.0/24"], [])
        expected = (
            ["45.90.31.1", nothing[1], "45.90.31.1", nothing[3], nothing[4]],
            [nothing[0], "45.90.31.2", nothing[2], "45.90.31.2", "45.90.50.5"],
            nothing,
        )
        for name, hosts, reached in zip(names, lists, expected, strict=True):
            spec = SessionSpec(runtime=site.runtime, limits=LIMITS, allowed_hosts=hosts)
            session = await service.sessions.create(ROOT, spec)
            live = service._sessions.find(ROOT, session.session_id)
            assert live.sandbox == name
            assert await (await site.enter(name)).reached(*TRIES) == reached
    finally:
        await pool.close()
        for session in await service.sessions.list(ROOT):
            await service.sessions.destroy(ROOT, session.session_id)
        await service.close()
        await store.close()
