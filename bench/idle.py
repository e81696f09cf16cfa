"""Measures the memory of an idle warm sandbox, against the bare runtime with a process that sleeps.

Memory is the proportional share (PSS) of every process in the sandbox's control group, its runtime's own included, so
that what they have in common with others counts once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from bench.agent import spawn
from bench.creates import make_bundle, pool_of
from bench.daemon import serving
from bench.samples import Measure
from k8e.engine import Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.engine.local.layout import Layout
from k8e.engine.local.runtime.cgroup import Cgroups


def shared_mib(cgroups: Cgroups, sandbox: str) -> float:
    kib = 0
    for pid in cgroups.processes(sandbox):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return kib / 1024


async def measure_warm(scratch: Path, runtime: str, count: int) -> tuple[float, ...]:
    folder = scratch / f"idle-{runtime}"
    async with serving(folder, pool_of(count)) as daemon:
        for _ in range(2):  # tells the pool what is wanted
            await daemon.destroy(await daemon.create(runtime))
        await daemon.wait_warm(count)
        cgroups = Cgroups(Layout(folder / "state", folder / "run").cgroup)
        return await asyncio.to_thread(lambda: tuple(shared_mib(cgroups, name) for name in cgroups.sandboxes()))


async def measure_in_turn(
    engine: LocalEngine, runtime: Runtime, scratch: Path, count: int, rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    warm: list[float] = []
    floors: list[float] = []
    for number in range(rounds):
        place = scratch / f"{runtime.value}-{number}"
        place.mkdir(mode=0o711)
        floors += [await measure_floor(engine, runtime, place, turn) for turn in range(count)]
        warm += await measure_warm(place, runtime.value, count)
    return tuple(warm), tuple(floors)


async def measure_floor(engine: LocalEngine, runtime: Runtime, scratch: Path, turn: int) -> float:
    """The runtime with the same bundle, and `sleep` in the place of the agent."""
    binary = engine.runtime(runtime)
    model = f"floor-{runtime.value}"
    await engine.create(model, SandboxSpec(runtime))
    root = str(scratch / "floor")
    name = f"floor-{secrets.token_hex(4)}"
    try:
        group = Cgroups("k8e-bench")
        bundle = scratch / f"floor-bundle-{turn}"
        make_bundle(engine, model, bundle, ["/usr/bin/sleep", "1000"], group.path_of(name))
        words = (binary.binary, "--root", root, *binary.flags)
        await spawn(*words, "run", "--detach", "--bundle", str(bundle), name)
        try:
            return await asyncio.to_thread(shared_mib, group, name)
        finally:
            await asyncio.to_thread(group.kill, name)
            await asyncio.to_thread(group.remove, name)
            await asyncio.to_thread(group.remove_all)
    finally:
        await engine.destroy(model)


async def measure_idle(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count, rounds = (3, 1) if quick else (8, 4)
    (scratch / "e").mkdir(mode=0o711)
    engine = LocalEngine(scratch / "e" / "state", scratch / "e" / "run")
    try:
        reports = [report for report in await engine.probe() if report.available]
        for report in reports:
            warm, floors = await measure_in_turn(engine, report.runtime, scratch, count, rounds)
            name = f"{report.runtime.value}: memory of a warm sandbox"
            yield Measure(name, "MiB", warm, "the bare runtime with `sleep`", floors)
    finally:
        await engine.close()
