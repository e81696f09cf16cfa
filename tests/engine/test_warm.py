"""Sandboxes made ahead by a real engine: what is claimed is as good as new; a killed daemon leaves none half made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from k8e.core.model import Caller, RunSpec, SessionSpec
from k8e.core.service import Service
from k8e.core.store.store import Store
from k8e.engine import Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.settings import PoolSettings
from tests.engine.answers import plant_answers
from tests.engine.rig import LIMITS, Rig, find_report, open_engine, place_for_engine
from tests.engine.traces import find_traces, wait_for_no_traces
from tests.runtimes import do_without
from tests.shares import seed

ROOT = Caller(0)
SOAK = bool(os.environ.get("K8E_SOAK"))
REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class House:
    """A service on an engine of the module's rig."""

    runtime: Runtime
    engine: LocalEngine
    store: Store
    service: Service

    async def create(self, env: dict[str, str] | None = None) -> str:
        spec = SessionSpec(runtime=self.runtime, limits=LIMITS, env=env or {}, allowed_hosts=[])
        return (await self.service.sessions.create(ROOT, spec)).session_id

    async def run(self, session: str, code: str) -> str:
        result = await self.service.runs.run(ROOT, RunSpec(session, code))
        assert result.exit_code == 0, result
        return result.stdout.decode()

    def sandbox_of(self, session: str) -> str:
        return next(live.sandbox for live in self.service._registry if live.session_id == session)

    async def fill(self) -> list[str]:
        await self.service._pool.settle()
        return [name for names in self.service._pool._ready.values() for name in names]

    async def clear(self) -> None:
        for session in await self.service.sessions.list(ROOT):
            await self.service.sessions.destroy(ROOT, session.session_id)


@contextlib.asynccontextmanager
async def open_house(rig: Rig, folder: Path, number: int) -> AsyncIterator[House]:
    store = await Store.open(folder / "k8e.db")
    pool = PoolSettings(enabled=number > 0, min=number, max=number)
    service = Service(rig.engine, store, pool=pool)
    try:
        await service.recover()
        yield House(rig.runtime, rig.engine, store, service)
    finally:
        await service.close()
        await store.close()


# Of the pid only that few were before: the threads of runc's own beginning take some, and interpreters that are parked
# (docs/parking.md), in new sandboxes a moment later. Those are no part of the look for the same reason.
LOOK = r"""
id; pwd; env | sort; umask; ulimit -a; [ $$ -lt 100 ]; echo "$?"; hostname; uname -n
grep -E '^(Cap|NoNew|Seccomp|Groups)' /proc/self/status
for d in /workspace /tmp /run /var /home /root /opt /srv /dev/shm; do
    find $d -xdev -printf '%p %M %U:%G %s\n' 2>/dev/null | sort
done
find /workspace /home /tmp /var -xdev -printf '%p %T@\n' | sort
cat /proc/[0-9]*/comm 2>/dev/null | grep -Ev '^(bash|python.*|node|MainThread|cat|grep|sort)$' | sort -u
ls /proc/self/fd; cat ~/.bash_history 2>&1; df -i /workspace | tail -1 | awk '{print $2, $3}'
cut -d' ' -f4- /proc/self/mountinfo | sort |
    sed -E 's#/[^ ]*/sandboxes/[^/ ]+#TOP#g; s#/dev/loop[0-9]+#LOOP#; s/[ug]id=[0-9]+/ID/g'
"""


async def test_a_claimed_one_looks_like_a_new_one(rig: Rig, tmp_path: Path) -> None:
    async with open_house(rig, tmp_path, 1) as house:
        new = [await house.create({"A": "1"}), await house.create({"A": "1"})]
        (name,) = await house.fill()
        claimed = await house.create({"A": "1"})
        assert house.sandbox_of(claimed) == name
        seen = [await house.run(session, LOOK) for session in (*new, claimed)]
        assert seen[0] == seen[1], "two new ones differ: the look is at something that says nothing"
        assert seen[2] == seen[0]
        await house.clear()


LITTER = """
echo secret-of-the-last > file; echo secret > /tmp/secret; echo secret > /dev/shm/secret; echo secret > ~/.bash_history
mkdir -p ~/.config; echo secret > ~/.config/secret; touch /var/tmp/secret; (setsid sleep 1000 >/dev/null 2>&1 &)
"""


async def test_nothing_of_the_last_session_is_in_the_next(rig: Rig, tmp_path: Path) -> None:
    async with open_house(rig, tmp_path, 2) as house:
        for _ in range(2):
            await house.create()
        names = await house.fill()
        used: set[str] = set()
        for number in range(3):
            session = await house.create({"SECRET": f"secret-{number}"})
            assert house.sandbox_of(session) not in used
            used.add(house.sandbox_of(session))
            found = await house.run(session, "find / -xdev -name '*secret*' 2>/dev/null; cat /proc/[0-9]*/cmdline; env")
            assert "sleep" not in found.replace("secret", "")
            assert [line for line in found.splitlines() if "secret" in line and "find" not in line] == [
                f"SECRET=secret-{number}"
            ]
            await house.run(session, LITTER)
            await house.service.sessions.destroy(ROOT, session)
            await house.fill()
        assert set(names) <= used
        await house.clear()


async def test_some_at_once_get_different_ones(rig: Rig, tmp_path: Path) -> None:
    async with open_house(rig, tmp_path, 4) as house:
        for _ in range(2):
            await house.create()
        names = await house.fill()
        assert len(names) == 4
        sessions = await asyncio.gather(*(house.create() for _ in range(6)))
        assert [house.sandbox_of(session) for session in sessions[:4]] == names
        assert len({house.sandbox_of(session) for session in sessions}) == 6
        answers = await asyncio.gather(*(house.run(one, f"echo {one} >> mine; cat mine") for one in sessions))
        assert [answer.split() for answer in answers] == [[one] for one in sessions]
        await house.clear()


async def test_a_dead_one_is_replaced(rig: Rig, tmp_path: Path) -> None:
    async with open_house(rig, tmp_path, 2) as house:
        for _ in range(2):
            await house.create()
        dead, good = await house.fill()
        for pid in rig.host_processes(dead):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while (await rig.engine.observe(dead)).alive:
            await asyncio.sleep(0.01)
        assert house.sandbox_of(await house.create()) == good
        await house.clear()


async def test_the_next_daemon_goes_on_with_them(rig: Rig, tmp_path: Path) -> None:
    async with open_house(rig, tmp_path, 1) as house:
        for _ in range(2):
            await house.create()
        (name,) = await house.fill()
        house.service._pool._ready.clear()  # a daemon that is stopped destroys them, one that is killed does not
    # What a new daemon knows of them, in the same process: nothing.
    await rig.engine.close()
    follower = Rig(rig.runtime, LocalEngine(rig.engine.layout.state, rig.engine.layout.run), rig.report)
    try:
        async with open_house(follower, tmp_path, 1) as house:
            await house.fill()
            session = await house.create({"A": "1"})
            assert house.sandbox_of(session) == name
            assert await house.run(session, "echo $A") == "1\n"
            await house.clear()
        async with open_house(follower, tmp_path, 0) as house:
            # One to try a runtime with may come and go.
            assert [each for each in await follower.engine.list() if not each.startswith("probe-")] == []
    finally:
        await follower.engine.close()


async def test_an_edition_tells_apart_what_sandboxes_are_made_of(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SandboxSpec(rig.runtime, limits=LIMITS)
    edition = await rig.engine.edition(spec)
    other = LocalEngine(rig.engine.layout.state, rig.engine.layout.run)
    try:
        assert await other.edition(spec) == edition
        monkeypatch.setattr("k8e.engine.local.roots.host_image.host_paths", lambda tools: [])
        assert await other.edition(spec) != edition
    finally:
        await other.close()


@pytest.mark.parametrize("runtime", [Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def test_killed_while_it_makes_them_it_leaves_nothing(runtime: Runtime) -> None:
    chance = random.Random(seed(f"killed while it makes them, {runtime.value}"))
    with place_for_engine() as (state, run):
        plant_answers(state)
        state.chmod(0o711)
        async with open_engine(state, run) as engine:
            report = await find_report(engine, runtime)
            if not report.available:
                do_without(runtime.value, report.reason)
            names: set[str] = set()
            for _ in range(5 if SOAK else 1):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.engine.doomed_pool", state, run, runtime.value),
                    cwd=REPOSITORY,
                    stdout=asyncio.subprocess.PIPE,
                )
                assert process.stdout is not None
                for _ in range(2 + chance.randrange(1, 4)):
                    line = await process.stdout.readline()
                    assert line, "it ended by itself"
                    names.add(line.decode().strip())
                await asyncio.sleep(chance.random() * 0.3)  # somewhere in the middle of making it
                process.kill()
                await process.wait()
            assert find_traces(engine.layout)
            store = await Store.open(state / "k8e.db")
            service = Service(engine, store)
            await service.recover()
            for session in await service.sessions.list(ROOT):
                await service.sessions.destroy(ROOT, session.session_id)
            assert await store.warm() == []
            await service.close()
            await store.close()
            await wait_for_no_traces(engine.layout, names)
