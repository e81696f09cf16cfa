"""`kill -9` of the daemon, or of the VMM, while a virtual machine is made, claimed, stopped, started or destroyed: the
next daemon finds what is there, its start brings the files back, and its destroy leaves nothing.

Each death takes a boot or two. A soak has all, each action in pieces, so that no test of it takes more than minutes; a
normal run has a share of one action."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from k8e.engine import EngineError
from k8e.engine.local.record import Record
from k8e.link.errors import LinkError
from k8e.policy import HostList
from tests.engine.driver import Driver
from tests.engine.rig import Rig, eventually, read_host
from tests.engine.test_crashes import die_at_each, reclaim
from tests.engine.vm.conftest import VM_LIMITS, choose_few, find_turn, on_its_day
from tests.shares import current_share

pytestmark = [on_its_day(0), pytest.mark.timeout(1800)]
ROUNDS = 6
ACTIONS = ("create", "stop", "start", "destroy", "claim")
PIECES = 4  # of an action's steps, in a soak
RUNNING = "vm/runtime.VmRuntime.start"  # from here on there is a VMM
LISTED = "192.0.2.7"  # on the list that a claim brings


@dataclass(frozen=True, slots=True)
class Part:
    """Which deaths a test has."""

    action: str
    piece: int | None  # None: the share of a normal run

    def __str__(self) -> str:
        return self.action if self.piece is None else f"{self.action}-{self.piece + 1}-of-{PIECES}"

    def choose(self, steps: Sequence[str]) -> list[str]:
        return choose_few(steps, ROUNDS) if self.piece is None else list(steps)[self.piece :: PIECES]


def choose_parts() -> list[Part]:
    if current_share().parts == 1:
        return list(itertools.starmap(Part, itertools.product(ACTIONS, range(PIECES))))
    return [Part(ACTIONS[find_turn() // 3 % len(ACTIONS)], None)]


@dataclass
class Deaths:
    """Attempts at one action, each by a daemon that dies at a step of it, if one is given; or whose VMM does."""

    driver: Driver
    vmm: bool = False
    name: str = ""  # of one that is stopped and started again and again
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(1000))  # a refusal is told once for each

    @property
    def rig(self) -> Rig:
        return self.driver.rig

    async def _ask(self, action: str, name: str, step: str | None) -> dict[str, Any]:
        return await self.driver.ask(do=action, name=name, step=step, victim=name if self.vmm else None)

    async def create(self, step: str | None = None) -> dict[str, Any]:
        answer = await self._ask("create", self.rig.new_name(), step)
        await reclaim(self.rig)
        return answer

    async def destroy(self, step: str | None = None) -> dict[str, Any]:
        name = self.rig.new_name()
        await self.rig.engine.create(name, self.rig.spec(VM_LIMITS))
        await self.rig.engine.close()
        answer = await self._ask("destroy", name, step)
        if answer["ended"] == "finished":
            assert name not in await self.rig.engine.list()
        await reclaim(self.rig)
        return answer

    async def stop(self, step: str | None = None) -> dict[str, Any]:
        if not await self._runs():
            await self.bring_back()
        return await self._attempt("stop", step)

    async def start(self, step: str | None = None) -> dict[str, Any]:
        if not self.name:
            await self.bring_back()
        await self.rig.engine.stop(self.name)
        return await self._attempt("start", step)

    async def claim(self, step: str | None = None) -> dict[str, Any]:
        """The engine's part of it: a machine that is there gets a list of hosts, and the clock. The next daemon's list
        is in force, whatever was begun."""
        if not await self._runs():
            await self.bring_back()
        answer = await self._attempt("claim", step)
        if not self.vmm:
            assert await self._runs(), "it outlives the daemon"
            engine, port = self.rig.engine, next(self.ports)
            await engine.set_egress(self.name, HostList.parse([]))
            room = await self.rig.enter(self.name)
            assert (await room.run("bash", "-c", f"exec 3<>/dev/tcp/{LISTED}/{port}")).outcome.exit_code == 1
            refused = {(each.address, each.port) for each in (await engine.observe(self.name)).refusals}
            assert (LISTED, port) in refused, refused
        return answer

    async def _attempt(self, action: str, step: str | None) -> dict[str, Any]:
        await self.rig.engine.close()  # it is another one's now
        answer = await self._ask(action, self.name, step)
        if await self._runs():
            await self._look_at_it(ending=action == "stop" or (self.vmm and step is not None))
        else:  # whatever was begun, a stop leaves nothing but the files
            await self.rig.engine.stop(self.name)
            left = sorted(path.name for path in self.rig.engine.layout.sandbox(self.name).top.iterdir())
            assert left == ["disk.img", "sandbox.json"], left
        return answer

    async def _runs(self) -> bool:
        if not self.name or not Record.load(self.rig.engine.layout.sandbox(self.name).record).ready:
            return False
        return (await self.rig.engine.observe(self.name)).alive

    async def _look_at_it(self, *, ending: bool) -> None:
        try:
            await self._look()
        except (EngineError, LinkError):
            assert ending, "it was made"

            async def has_ended() -> bool:
                return not await self._runs()

            await eventually(has_ended, "its guest had been told to halt, or its VMM killed", deadline=120.0)

    async def _look(self) -> None:
        assert await (await self.rig.enter(self.name)).output("cat", "file") == "kept\n"

    async def bring_back(self) -> None:
        """The next start finds the files."""
        engine, spec = self.rig.engine, self.rig.spec(VM_LIMITS)
        if self.name:
            await engine.start(self.name, spec)
        else:
            self.name = self.rig.new_name()
            await engine.create(self.name, spec)
            await (await self.rig.enter(self.name)).output("/bin/sh", "-c", "echo kept > file; sync")
        await self._look()

    async def end(self) -> None:
        if self.name and not await self._runs():
            await self.bring_back()
        await reclaim(self.rig)


@pytest.mark.parametrize("part", choose_parts(), ids=str)
async def test_the_daemon_killed_at_every_step(driver: Driver, part: Part) -> None:
    deaths = Deaths(driver)
    attempt = getattr(deaths, part.action)
    learnt = await attempt()
    assert learnt["ended"] == "finished", learnt
    if part.action in ("create", "start"):  # from the first trace on up to where the VMM runs
        assert {"network/wires.open_tap", "vm/launcher._open_scratch", RUNNING} <= set(learnt["steps"]), learnt
    elif part.action == "claim":
        assert {"engine.LocalEngine.set_egress", "vm/machines.Machines.count_kills"} <= set(learnt["steps"]), learnt
    await die_at_each(part.choose(learnt["steps"]), attempt)
    await deaths.end()


@pytest.mark.parametrize("part", choose_parts(), ids=str)
async def test_the_vmm_killed_at_every_step(driver: Driver, part: Part) -> None:
    """The daemon lives: what it makes fails and is gone, and what it ends is ended."""
    deaths = Deaths(driver, vmm=True)
    attempt = getattr(deaths, part.action)
    learnt = await attempt()
    steps = learnt["steps"]
    if RUNNING in steps:
        steps = steps[steps.index(RUNNING) + 1 :]
    assert len(steps) > 5, learnt
    for step in part.choose(steps):
        answer = await attempt(step)
        if part.action in ("stop", "destroy"):
            assert answer["ended"] == "finished", (step, answer)
        else:  # at a step after the agent's first answer it is made, and dead
            assert answer["ended"] in ("failed", "finished"), (step, answer)
    await deaths.end()


def read_cpu_ticks(pids: set[int]) -> int:
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the runtime's own, which end
            ticks += sum(map(int, read_host(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:13]))
    return ticks


@pytest.mark.parametrize("tenth", choose_few(range(10), 2))
async def test_the_vmm_killed_while_it_boots(rig: Rig, tenth: int) -> None:
    """How far it is is told by the processor time that it took: a boot takes the same each time, however busy the
    machine is."""
    async with rig.room(VM_LIMITS) as room:
        whole = read_cpu_ticks(rig.host_processes(room.name))
    name = rig.new_name()
    making = asyncio.create_task(rig.engine.create(name, rig.spec(VM_LIMITS)))

    async def has_come_so_far() -> bool:
        pids = rig.host_processes(name)
        return making.done() or (bool(pids) and read_cpu_ticks(pids) >= whole * tenth / 10)

    await eventually(has_come_so_far, "it boots", deadline=240.0)
    for pid in rig.host_processes(name):
        os.kill(pid, signal.SIGKILL)
    (result,) = await asyncio.gather(making, return_exceptions=True)
    if result is None:
        assert tenth > 5, "it was made before that"
        await rig.engine.destroy(name)
    else:
        assert isinstance(result, EngineError), result
    assert name not in await rig.engine.list()
