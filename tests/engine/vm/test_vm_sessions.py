"""Sessions in virtual machines: made ahead and claimed, with interpreters that wait, and what their results say."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from k8e.core.model import Language, RunSpec, SessionSpec, Status
from k8e.core.service import Service
from k8e.core.store.store import Store
from k8e.engine import Runtime
from k8e.settings import PoolSettings
from tests.core.test_pool import Gauge
from tests.engine.rig import Rig
from tests.engine.vm.conftest import VM_LIMITS, on_its_day
from tests.parking.test_service import ALICE, run

pytestmark = on_its_day(1)
PATIENCE = 240.0


# What comes in from outside: a variable, the name, the clock, entropy, an address.
LOOK = """
import json, os, socket, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(("203.0.113.9", 9))
print(json.dumps({
    "who": os.environ["WHO"], "host": os.uname().nodename, "clock": time.time(), "random": os.urandom(16).hex(),
    "boot": open("/proc/sys/kernel/random/boot_id").read(), "address": probe.getsockname()[0],
}))
"""


async def wait_for_years(rig: Rig, name: str) -> None:
    """As far as its clock can tell: it is an hour of 2001 there, and long since it was set."""
    control = await rig.engine._machines._control(name)
    assert control is not None
    await control._ask(b"clock %d" % (10**18), 60.0)
    control._clock_set = -(10.0**9)


async def test_a_warm_machine_is_claimed_and_has_an_interpreter_that_waits(rig: Rig, tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "state.db")
    service = Service(rig.engine, store, pool=PoolSettings(min=0, max=2), memory=Gauge())
    spec = SessionSpec(runtime=Runtime.KATA, limits=VM_LIMITS, env={"WHO": "me"})
    try:
        await service.recover()
        service.keep_up()
        await service.warm.reserve(ALICE, "machines", spec, 2)
        async with asyncio.timeout(PATIENCE):
            while service.metrics.warm.value < 2:
                await asyncio.sleep(0.1)
        await service.warm.reserve(ALICE, "machines", spec, 0)
        warm = await rig.engine.list()
        for name in warm:
            await wait_for_years(rig, name)
        session, other = [await service.sessions.create(ALICE, spec) for _ in range(2)]
        assert session.emulated
        assert await rig.engine.list() == warm, "those that were there"
        looks = [RunSpec(each.session_id, LOOK, language=Language.PYTHON, timeout=120) for each in (session, other)]
        results = [await service.runs.run(ALICE, look) for look in looks]
        assert [(result.exit_code, result.emulated) for result in results] == [(0, True)] * 2, results
        mine, theirs = [json.loads(result.stdout) for result in results]
        assert (mine["who"], mine["host"]) == ("me", "sandbox")
        assert abs(mine["clock"] - time.time()) < 300, "the host's clock, though it was wrong while it waited"
        for name in ("boot", "random", "address"):
            assert mine[name] != theirs[name], name
        await service.sessions.destroy(ALICE, other.session_id)
        async with asyncio.timeout(PATIENCE):
            while not (await run(service, session.session_id, "print(1)", Language.PYTHON))[1]:
                await asyncio.sleep(0.3)
        code = "x = [b'x' * (1 << 22) for _ in range(1 << 20)]"
        hog = RunSpec(session.session_id, code, language=Language.PYTHON, timeout=120)
        result = await service.runs.run(ALICE, hog)
        assert (result.status, result.exit_code, result.emulated) == (Status.OOM_KILLED, 137, True)
        assert (await service.runs.run(ALICE, RunSpec(session.session_id, "echo well"))).stdout == b"well\n"
        await service.sessions.destroy(ALICE, session.session_id)
    finally:
        await service.close()
        await store.close()
        for name in await rig.engine.list():
            rig.names.add(name)
            await rig.engine.destroy(name)
