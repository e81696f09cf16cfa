"""A service over real sandboxes, and what tests of it have in common."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.clock import Clock, SystemClock
from k8e.core.contract import SandboxService
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller, RunResult, RunSpec, SessionSpec, Status
from k8e.core.pool.memory import Memory
from k8e.core.service import Service
from k8e.core.store.environments import FileEnvironments
from k8e.core.store.store import Store
from k8e.engine import EngineError
from k8e.link.model import AGENT
from k8e.settings import PoolSettings, Settings
from tests.core.bare_engine import BareEngine, find_processes
from tests.core.mirror import open_store

ALICE = Caller(1000)
BOB = Caller(1001)
ROOT = Caller(0)


class ManualClock:
    """Stands still until told otherwise."""

    def __init__(self, boot: str = "this boot") -> None:
        self.boot = boot
        self.now = 1000.0
        self.wall_now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.wall_now += seconds


class Rig:
    """One daemon's worth of service on a folder; the next rig on the same folder is the next daemon."""

    def __init__(
        self,
        folder: Path,
        engine: BareEngine,
        store: Store,
        clock: Clock,
        settings: Settings | None = None,
        pool: PoolSettings | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.folder = folder
        self.engine = engine
        self.store = store
        audit = folder / "audit.log"
        self.service = Service(
            *(engine, store),
            clock=clock,
            settings=settings,
            pool=pool,
            memory=memory,
            audit_file=audit,
            environments=FileEnvironments(folder / "environments"),
        )
        self.as_door: SandboxService = self.service

    async def create(self, caller: Caller = ALICE, spec: SessionSpec | None = None) -> str:
        return (await self.service.sessions.create(caller, spec or SessionSpec())).session_id

    async def run(self, session_id: str, code: str, caller: Caller = ALICE) -> RunResult:
        return await self.service.runs.run(caller, RunSpec(session_id, code))

    async def start_background(self, session_id: str, code: str, limit: float = 60) -> str:
        result = await self.service.runs.run(ALICE, RunSpec(session_id, code, background=True, timeout=limit))
        assert (result.status, result.exit_code) == (Status.RUNNING, None)
        return result.run_id

    async def poll_to_the_end(self, run_id: str) -> RunResult:
        while (result := await self.service.runs.poll(ALICE, run_id)).status is Status.RUNNING:
            await asyncio.sleep(0.01)
        return result

    def sandbox_of(self, session_id: str) -> str:
        (live,) = (live for live in self.service._registry if live.session_id == session_id)
        return live.sandbox

    async def processes_inside(self, session_id: str) -> list[int]:
        """By the agent's own eyes: what runs beside it, zombies aside."""
        link, _ = await self.engine.attach(self.sandbox_of(session_id))
        found = []
        for entry in await link.list_dir(b"/proc"):
            if entry.name.isdigit() and entry.name != b"1":
                with contextlib.suppress(Exception):  # it ended meanwhile
                    if await link.read_file(b"/proc/" + entry.name + b"/cmdline", identity=AGENT):
                        found.append(int(entry.name))
        return found

    async def wait_until_alone(self, session_id: str) -> None:
        while await self.processes_inside(session_id):
            await asyncio.sleep(0.01)

    def read_audit(self) -> list[dict[str, Any]]:
        """What people did, then what was refused."""
        files = [self.folder / name for name in ("audit.log", "audit-refusals.log")]
        return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]

    async def assert_no_trace(self) -> None:
        assert await self.engine.list() == []
        assert find_processes(str(self.folder)) == []


@contextlib.asynccontextmanager
async def open_rig(
    folder: Path,
    clock: Clock | None = None,
    settings: Settings | None = None,
    failing: EngineError | None = None,
    pool: PoolSettings | None = None,
    memory: Memory | None = None,
) -> AsyncIterator[Rig]:
    """A daemon that comes and goes orderly. Sandboxes stay."""
    engine = BareEngine(folder / "sandboxes")
    engine.egress_failure = failing
    store = await open_store(folder)
    rig = Rig(folder, engine, store, clock or SystemClock(), settings, pool, memory)
    try:
        await rig.service.recover()
        yield rig
    finally:
        await rig.service.close()
        await engine.close()
        await store.close()


async def remove_sandboxes(folder: Path) -> None:
    engine = BareEngine(folder / "sandboxes")
    for pid in find_processes(f"{folder / 'sandboxes'}/"):  # all at once: looking takes longest
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for sandbox in await engine.list():
        await engine.destroy(sandbox)


@contextlib.contextmanager
def fault(kind: Kind, code: str, field: str = "") -> Iterator[None]:
    with pytest.raises(Fault) as caught:
        yield
    got = caught.value
    assert (got.kind, got.code, got.field) == (kind, code, field or got.field), got
