"""kill -9 of the process that runs the engine, at every step of create, stop, start and destroy and at any moment
between: the next engine finds what is left, its start brings the files back, and its destroy leaves nothing.

There are some 140 steps, and each death takes a while: a soak has them all, a normal run a share of them (shares.py),
and another one for each runtime."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from k8e.engine import EngineError, Shape
from k8e.engine.local import LocalEngine
from k8e.engine.local.record import Record
from k8e.engine.local.system.tool import run_tool
from tests.changes import current_changes
from tests.engine.doomed_driver import EGRESS, SOURCE
from tests.engine.driver import Driver
from tests.engine.grounds import open_grounds
from tests.engine.rig import Rig, eventually
from tests.engine.tiny_images import add_image
from tests.engine.traces import find_traces, wait_for_no_traces
from tests.shares import choose, seed

RANDOM_KILLS = int(os.environ.get("K8E_KILLS", "8"))
ATTEMPTS = 3  # to reach a step
MOUNTING = ("mounts/", "system/calls.")
# What the machine's last engine sets back: whether it is the last depends on its neighbours.
SOMETIMES = {"network/machine.Machine._give_back", "network/ip_forward.restore", "network/ip_forward._recall"}
SOMETIMES |= {"network/netlink/route.own_addresses", "network/netlink/route.RoutingRule.remove"}
# It is asked about rules that any engine of the machine removes.
SOMETIMES |= {"network/network.Network._has_wire"}
# A wire that the kernel removes with the sandbox's namespace, before it is looked for, or after.
SOMETIMES |= {"network/netlink/route.RouteSocket.index_of", "network/netlink/route.remove_link"}
SELDOM = 2  # others that a run may have learnt on a slow machine, and that none of ATTEMPTS whole runs had


async def reclaim(rig: Rig) -> None:
    """Does what the next daemon does with sandboxes that it has no use for."""
    successor = LocalEngine(rig.engine.layout.state, rig.engine.layout.run)
    for name in await successor.list():
        await successor.destroy(name)
    await successor.close()
    assert await successor.list() == []
    await wait_for_no_traces(rig.engine.layout, rig.names)


async def learn_steps(driver: Driver, action: str) -> list[str]:
    """The steps of one that is left alone."""
    name = driver.rig.new_name()
    if action == "destroy":
        await driver.rig.engine.create(name, driver.rig.spec())
    answer = await driver.ask(do=action, name=name)
    assert answer["ended"] == "finished", answer
    steps: list[str] = answer["steps"]
    await reclaim(driver.rig)
    return steps


def has_changed(step: str) -> bool:
    module, _, name = step.partition(".")
    return current_changes().touch_definition(f"{SOURCE}{module}.py", name)


def choose_steps(driver: Driver, steps: list[str], times: int = 1) -> list[str]:
    """Those that this run dies at: other ones for each runtime on one day."""
    return choose(steps, times=times, turn=0 if driver.rig.native else 3, always=has_changed)


Attempt = Callable[[str], Awaitable[dict[str, Any]]]


async def die_at_each(steps: list[str], attempt: Attempt) -> None:
    """Each of them is reached, but for those that not every run has, and what reaches it dies there."""
    missed: list[str] = []
    for step in steps:
        for _ in range(ATTEMPTS):
            end = await attempt(step)
            if end["ended"] == "killed":
                break
            assert end["ended"] == "finished", (step, end)
            assert step not in end["steps"], f"{step} was done and no process died"
        else:
            missed.append(step)
    strange = sorted(set(missed) - SOMETIMES)
    assert len(strange) <= SELDOM, f"never reached: {strange}"


async def test_killed_at_every_step_of_create(driver: Driver) -> None:
    steps = await learn_steps(driver, "create")
    assert len(steps) > 10, steps

    async def attempt(step: str) -> dict[str, Any]:
        answer = await driver.ask(do="create", name=driver.rig.new_name(), step=step)
        await reclaim(driver.rig)
        return answer

    await die_at_each(choose_steps(driver, steps), attempt)


async def test_killed_at_every_step_of_making_an_images_root(driver: Driver) -> None:
    if not driver.rig.native:
        pytest.skip("shown with the runtime that has more of them: its layers are mapped")
    image = await add_image(driver.rig.engine)
    answer = await driver.ask(do="create", name=driver.rig.new_name(), image=image.digest)
    assert answer["ended"] == "finished", answer
    await reclaim(driver.rig)
    modules = (
        "roots/overlay.",
        "mounts/detached.",
        "system/calls.",
        "roots/image_root.prepare_root",
        "roots/image_root.save_place",
        "roots/root_files.RootFiles.write",
    )
    steps = [step for step in answer["steps"] if step.startswith(modules)]
    assert {"roots/overlay.mount_layers", "system/calls.move_mount", "roots/root_files.RootFiles.write"} <= set(
        steps
    ), steps

    async def attempt(step: str) -> dict[str, Any]:
        answer = await driver.ask(do="create", name=driver.rig.new_name(), image=image.digest, step=step)
        await reclaim(driver.rig)
        return answer

    await die_at_each(steps, attempt)


async def test_killed_at_every_step_of_destroy(driver: Driver) -> None:
    steps = await learn_steps(driver, "destroy")
    assert len(steps) > 5, steps

    async def attempt(step: str) -> dict[str, Any]:
        name = driver.rig.new_name()
        await driver.rig.engine.create(name, replace(driver.rig.spec(), egress=EGRESS))
        await driver.rig.engine.close()
        answer = await driver.ask(do="destroy", name=name, step=step)
        await reclaim(driver.rig)
        return answer

    await die_at_each(choose_steps(driver, steps), attempt)


@pytest.mark.parametrize("action", ["stop", "start"])
async def test_killed_at_every_step_of_stop_and_start(driver: Driver, action: str) -> None:
    """Whatever was begun, the next start finds the files, and a stop after that leaves nothing but them."""
    rig = driver.rig
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    await (await rig.enter(name)).output("/bin/sh", "-c", "echo kept > file")
    turns = itertools.count()

    async def attempt(step: str | None) -> dict[str, Any]:
        if action == "start":
            await rig.engine.stop(name)
        await rig.engine.close()  # it is another one's now
        answer = await driver.ask(do=action, name=name, step=step)
        whole = Record.load(rig.engine.layout.sandbox(name).record).ready and (await rig.engine.observe(name)).alive
        if whole or next(turns) % 2:
            await rig.engine.stop(name)
        await rig.engine.start(name, rig.spec())
        assert await (await rig.enter(name)).output("cat", "file") == "kept\n"
        return answer

    learnt = await attempt(None)
    assert learnt["ended"] == "finished", learnt
    steps = learnt["steps"]
    assert len(steps) > 10, steps
    await die_at_each(choose_steps(driver, steps), attempt)
    await rig.engine.destroy(name)
    await reclaim(rig)


async def test_killed_while_directories_of_the_machine_are_mounted(driver: Driver) -> None:
    if not driver.rig.native:
        pytest.skip("the same steps as natively, before the runtime is started")
    with open_grounds() as grounds:
        before = sorted(grounds.top.rglob("*"))
        order = {"do": "create", "grounds": str(grounds.top)}
        answer = await driver.ask(**order, name=driver.rig.new_name())
        assert answer["ended"] == "finished", answer
        await reclaim(driver.rig)
        steps = [step for step in answer["steps"] if step.startswith(MOUNTING)]
        assert len(steps) > 15, steps
        for step in choose_steps(driver, steps, times=2):
            assert (await driver.ask(**order, name=driver.rig.new_name(), step=step))["ended"] == "killed", step
            await reclaim(driver.rig)
        assert sorted(grounds.top.rglob("*")) == before
        os.rename(grounds.project / ".git/hooks", grounds.project / "hooks")  # nothing is mounted there any more


async def test_killed_while_one_that_was_made_ahead_is_bound(driver: Driver) -> None:
    """The next engine removes it, and with it everything that was made for it in a user's project."""
    rig = driver.rig
    with open_grounds() as grounds:
        before = sorted(grounds.top.rglob("*"))

        async def ask(**more: str) -> dict[str, Any]:
            room = await rig.shaped(Shape(mounts=grounds.mounts()).unbound)
            await rig.engine.close()  # it is another one's now
            answer = await driver.ask(do="bind", name=room.name, grounds=str(grounds.top), **more)
            await reclaim(rig)
            assert sorted(grounds.top.rglob("*")) == before, more
            return answer

        learnt = await ask()
        assert learnt["ended"] == "finished", learnt
        steps = [step for step in learnt["steps"] if step.startswith((*MOUNTING, "engine.LocalEngine._bind"))]
        own = [step for step in steps if step.startswith(("mounts/slots.", "engine."))]
        assert len(own) >= 4, steps
        assert len(steps) > 15, steps
        for step in dict.fromkeys((*own, *choose_steps(driver, steps))):
            assert (await ask(step=step))["ended"] == "killed", step
        os.rename(grounds.project / ".git/hooks", grounds.project / "hooks")  # nothing is mounted there any more


async def test_killed_while_a_workspace_is_shared(driver: Driver) -> None:
    if not driver.rig.native:
        pytest.skip("the same steps as natively, before the runtime is started")

    async def ask(**more: str) -> dict[str, Any]:
        owner = driver.rig.new_name()
        await driver.rig.engine.create(owner, driver.rig.spec())
        await driver.rig.engine.close()
        answer = await driver.ask(do="create", name=driver.rig.new_name(), shares=owner, **more)
        await reclaim(driver.rig)
        return answer

    steps = [step for step in (await ask())["steps"] if step.startswith(MOUNTING)]
    assert len(steps) > 3, steps
    for step in steps:
        assert (await ask(step=step))["ended"] == "killed", step


async def test_killed_at_random_moments(driver: Driver) -> None:
    """Also in the middle of the tools and runtimes that the engine runs, which must not go on without it."""
    chance = random.Random(seed(f"killed at random, {driver.rig.runtime.value}"))
    timing = await driver.ask(do="create", name=driver.rig.new_name())
    await reclaim(driver.rig)
    for number in range(RANDOM_KILLS):
        name = driver.rig.new_name()
        moment = chance.uniform(0, timing["seconds"])
        if number % 3 == 2:
            await driver.rig.engine.create(name, driver.rig.spec())
            await driver.rig.engine.close()
            answer = await driver.ask(do="destroy", name=name, after=moment / 4)
        else:
            answer = await driver.ask(do="create", name=name, after=moment)
        try:
            await reclaim(driver.rig)
        except (AssertionError, EngineError) as error:
            raise AssertionError(f"number {number}, {moment=}, {answer=}") from error


async def test_rules_without_a_lease_go_with_the_last_one_out(driver: Driver) -> None:
    """Killed when its table was there and its addresses were not."""
    answer = await driver.ask(do="create", name=driver.rig.new_name(), step="network/leases.Leases.lease_block")
    assert answer["ended"] == "killed"
    table = f"k8e_{driver.rig.engine.layout.tag}"
    assert table in await run_tool("nft", "list", "tables", capture=True)
    await reclaim(driver.rig)
    assert table not in await run_tool("nft", "list", "tables", capture=True)


async def test_a_name_is_free_again_after_a_crash(driver: Driver) -> None:
    rig = driver.rig
    name = rig.new_name()
    answer = await driver.ask(do="create", name=name, step="runtime/runtime.OciRuntime.start")
    assert answer["ended"] == "killed"
    assert name in await rig.engine.list()
    await rig.engine.destroy(name)
    await rig.engine.create(name, rig.spec())
    room = await rig.enter(name)
    assert await room.output("echo", "well") == "well\n"
    await rig.engine.destroy(name)


async def test_a_crash_while_preparing_leaves_no_half_image(rig: Rig) -> None:
    """Killed while the disk template is being filled: the next engine makes it anew and keeps nothing of the old."""
    layout = rig.engine.layout
    odd = rig.spec().limits.disk + (3 << 20)
    code = f"""
import asyncio, os, sys, dataclasses
from pathlib import Path
from k8e.engine.local import LocalEngine
from k8e.engine.local.disk import disk
from tests.engine.rig import LIMITS
from k8e.engine import Runtime, SandboxSpec
async def main():
    engine = LocalEngine(Path(sys.argv[1]), Path(sys.argv[2]))
    await engine.probe()
    async def die(*arguments, **options):
        os.kill(os.getpid(), 9)
    disk.run_tool = die
    limits = dataclasses.replace(LIMITS, disk={odd})
    await engine.create("never", SandboxSpec(Runtime.{rig.runtime.name}, limits=limits))
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, layout.state, layout.run)
    assert await process.wait() == -9
    half = [name for name in os.listdir(layout.images) if str(odd) in name]
    assert half, "it died while it was at it"
    successor = LocalEngine(layout.state, layout.run)
    name = rig.new_name()
    await successor.create(name, rig.spec())
    assert not [name for name in os.listdir(layout.images) if str(odd) in name]
    await successor.destroy(name)
    await successor.close()


# The sandbox's own processes.


def find_agent(rig: Rig, name: str) -> int:
    """The host's number of the sandbox's first process."""
    for pid in rig.host_processes(name):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("NSpid:") and line.split()[-1] == "1" and len(line.split()) > 2:
                    return pid
    raise AssertionError("no first process")


def find_runsc(rig: Rig, name: str, part: str) -> int:
    for pid in rig.host_processes(name):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
            if b"runsc" in words[0] and part.encode() in words:
                return pid
    raise AssertionError(f"no {part} process")


@pytest.mark.parametrize("part", ["agent", "boot", "gofer"])
async def test_killed_processes_of_a_sandbox_are_its_end(rig: Rig, part: str) -> None:
    if rig.native != (part == "agent"):
        pytest.skip(f"{rig.runtime.value} has no such process on the host")
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    room = await rig.enter(name)
    process = await room.link.start(room.spec("sleep", "1000"))
    process.discard()
    assert (await rig.engine.observe(name)).alive
    os.kill(find_agent(rig, name) if part == "agent" else find_runsc(rig, name, part), 9)

    async def is_dead() -> bool:
        return not (await rig.engine.observe(name)).alive

    await eventually(is_dead, "it is seen dead")
    assert name in await rig.engine.list(), "there is still something to clean up"
    with pytest.raises(EngineError):
        await rig.engine.attach(name)
    await rig.engine.destroy(name)
    assert not [trace for trace in find_traces(rig.engine.layout, [name]) if name in trace.what]


async def test_a_stopped_sandbox_can_be_destroyed(rig: Rig) -> None:
    """SIGSTOP on all that it has on the host: no process in there answers, and destroying asks none."""
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    for pid in rig.host_processes(name):
        os.kill(pid, 19)
    await rig.engine.destroy(name)
    assert name not in await rig.engine.list()


@pytest.mark.parametrize("turns", [0, 1, 5, 20, 40, 80])
async def test_destroyed_while_it_is_being_created(rig: Rig, turns: int) -> None:
    name = rig.new_name()
    task = asyncio.create_task(rig.engine.create(name, rig.spec()))
    for _ in range(turns):
        await asyncio.sleep(0.002)
    await rig.engine.destroy(name)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if result is None:
        # It was destroyed before it began, or after it was finished.
        assert (await rig.engine.observe(name)).alive == (name in await rig.engine.list())
    else:
        assert isinstance(result, EngineError), result
        assert name not in await rig.engine.list()
    await rig.engine.destroy(name)


@pytest.mark.parametrize("turns", [0, 1, 5, 10, 20, 40, 80])
async def test_cancelled_while_it_is_being_created(rig: Rig, turns: int) -> None:
    name = rig.new_name()
    task = asyncio.create_task(rig.engine.create(name, rig.spec()))
    for _ in range(turns):
        await asyncio.sleep(0.002)
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if result is None:
        await rig.engine.destroy(name)
    else:
        assert isinstance(result, asyncio.CancelledError), result

        async def is_gone() -> bool:
            return name not in await rig.engine.list()

        await eventually(is_gone, "a cancelled create cleans up")
