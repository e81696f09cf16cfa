"""Many sessions at once: how one command's latency grows with the sessions that are there, and what one takes.

Every session has its network and its list of hosts, as by default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.creates import COLD, MANY
from bench.daemon import Daemon, serving
from bench.samples import Measure

EXEC = {"argv": ["/usr/bin/true"]}


async def execute(daemon: Daemon, session: str) -> float:
    started = time.perf_counter()
    await daemon.call("POST", f"/v1/sessions/{session}/runs", EXEC)
    return (time.perf_counter() - started) * 1000


def available_memory() -> float:
    """MiB"""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable")


async def measure_density(daemon: Daemon, runtime: str, sizes: list[int], count: int) -> AsyncIterator[Measure]:
    """Memory that the machine has less, and how long `true` takes in the first session, with that many idle ones."""
    sessions = [await daemon.create(runtime)]
    alone = tuple([await execute(daemon, sessions[0]) for _ in range(count)])
    yield Measure(f"{runtime}: exec true, 1 session", "ms", alone)
    before = available_memory()
    for size in sizes:
        missing = size - len(sessions)
        slots = asyncio.Semaphore(4)

        async def create(slots: asyncio.Semaphore = slots) -> str:
            async with slots:
                return await daemon.create(runtime)

        sessions += await asyncio.gather(*(create() for _ in range(missing)))
        used = (before - available_memory()) / (size - 1)
        yield Measure(f"{runtime}: memory of a session, {size} idle", "MiB", (used,))
        taken = tuple([await execute(daemon, sessions[0]) for _ in range(count)])
        yield Measure(f"{runtime}: exec true, {size} sessions", "ms", taken, "1 session", alone)
    for session in sessions:
        await daemon.destroy(session)


async def measure_densities(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    async with serving(scratch / "density", COLD + MANY) as daemon:
        for runtime in await daemon.runtimes():
            sizes = [10, 30] if quick else [10, 100, 500] if runtime == "native" else [10, 100]
            async for measure in measure_density(daemon, runtime, sizes, 50):
                yield measure
