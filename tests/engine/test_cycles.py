"""Sandbox after sandbox: what the engine's process and the machine hold stays where it was. `make soak` runs more."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.engine.rig import Rig
from tests.engine.traces import cgroup_parents, find_traces, mount_points

CYCLES = int(os.environ.get("K8E_CYCLES", "30"))
WARM_UP = 5
AT_ONCE = 4
# Allocators breathe, and so does Python's table of interned strings, which has every part of every path that was ever
# named and takes megabytes more at once when it grows. So the memory is only to stay in the same order; what one cycle
# leaves behind is counted in objects.
BREATH = 12 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    descriptors: list[str]
    threads: int
    tasks: int
    mounts: int
    cgroups: list[str]
    entries: list[str]
    loop_devices: int


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rig: Rig) -> Footprint:
    gc.collect()
    layout = rig.engine.layout
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except FileNotFoundError:
            continue  # the listing's own
    entries = [
        os.path.join(parent, name)
        for top in (layout.state, layout.run)
        for parent, _, names in os.walk(top)
        for name in names
    ]
    return Footprint(
        descriptors=sorted(kinds),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        mounts=sum(point.startswith(str(layout.state.parent)) for point in mount_points()),
        cgroups=sorted(
            str(group) for parent in cgroup_parents(layout) for group in parent.rglob("*") if group.is_dir()
        ),
        entries=sorted(entries),
        loop_devices=sum(trace.kind == "loop device" for trace in find_traces(layout)),
    )


async def live_once(rig: Rig) -> None:
    async with rig.room() as room:
        assert await room.output("echo", "alive") == "alive\n"
        await room.link.write_file(b"/workspace/file", bytes(1 << 16))


async def test_cycles_leave_everything_where_it_was(rig: Rig) -> None:
    # All the threads that the loop will ever have, so that they are not counted as growth.
    await asyncio.gather(*(asyncio.to_thread(threading.Event().wait, 0.05) for _ in range(32)))
    for _ in range(WARM_UP):
        await live_once(rig)
    before, memory, objects = measure(rig), resident(), len(gc.get_objects())
    for _ in range(CYCLES):
        await live_once(rig)
    after = measure(rig)
    assert after == before
    assert len(gc.get_objects()) - objects < CYCLES, "at least one object of each cycle is left"
    assert resident() - memory < BREATH


async def test_cycles_at_once_leave_everything_where_it_was(rig: Rig) -> None:
    await asyncio.gather(*(live_once(rig) for _ in range(AT_ONCE)))
    before = measure(rig)
    for _ in range(max(1, CYCLES // 10)):
        await asyncio.gather(*(live_once(rig) for _ in range(AT_ONCE)))
    assert measure(rig) == before


async def test_failed_creates_leave_everything_where_it_was(rig: Rig) -> None:
    """The second of a name fails; so does one that is cancelled half way."""
    async with rig.room() as room:
        before = measure(rig)
        for turn in range(max(3, CYCLES // 5)):
            results = await asyncio.gather(rig.engine.create(room.name, rig.spec()), return_exceptions=True)
            assert isinstance(results[0], Exception)
            task = asyncio.create_task(rig.engine.create(rig.new_name(), rig.spec()))
            await asyncio.wait({task}, timeout=0.01 * turn)
            task.cancel()
            await asyncio.wait({task})
            for name in await rig.engine.list():
                if name != room.name:
                    await rig.engine.destroy(name)
        after = measure(rig)
        assert after == before
        assert await room.output("echo", "alive") == "alive\n"
