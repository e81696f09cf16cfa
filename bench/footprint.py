"""Measures the memory of the daemon itself: over many commands, over many sessions that come and go, and for each
session that is there and idle. Memory is private: pages that no other process has.

Flat is what does not grow from the first half to the second; a leak of forty bytes for each command shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from bench.creates import COLD, MANY
from bench.crowd import execute
from bench.daemon import Daemon, serving
from bench.samples import Measure

CLIENTS = 8
POINTS = 60  # samples of a long run, thirty in each half


def private_mib(pid: int) -> float:
    kib = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            kib += int(line.split()[1])
    return kib / 1024


async def repeat(work: Callable[[int], Awaitable[object]], count: int) -> None:
    """That many times, by several clients at once."""

    async def several(client: int) -> None:
        for number in range(client, count, CLIENTS):
            await work(number)

    await asyncio.gather(*map(several, range(CLIENTS)))


async def sample(daemon: Daemon, work: Callable[[int], Awaitable[object]], count: int, points: int) -> list[float]:
    """The daemon's memory after each part of the work; a first part, in which it warms up, does not count."""
    each = count // points
    await repeat(work, max(each, 2000 // points))
    found = []
    for _ in range(points):
        await repeat(work, each)
        found.append(await asyncio.to_thread(private_mib, daemon.process.pid))
    return found


def halve(name: str, found: list[float]) -> Measure:
    half = len(found) // 2
    return Measure(name, "MiB", tuple(found[half:]), "its first half", tuple(found[:half]))


async def measure_idle_sessions(daemon: Daemon, runtime: str, count: int, points: int) -> Measure:
    """KiB for each session, at several numbers of sessions."""
    sessions: list[str] = []

    async def create(_: int) -> None:
        sessions.append(await daemon.create(runtime))

    # What the daemon needs for its first ones, it needs once. They stay: else others would have their memory.
    await repeat(create, 2 * CLIENTS)
    await daemon.settle()
    first, before = len(sessions), private_mib(daemon.process.pid)
    found = []
    for _ in range(points):
        await repeat(create, count // points)
        found.append((private_mib(daemon.process.pid) - before) * 1024 / (len(sessions) - first))

    async def destroy(number: int) -> None:
        await daemon.destroy(sessions[number])

    await repeat(destroy, len(sessions))
    return Measure(f"{runtime}: daemon's memory for an idle session", "KiB", tuple(found))


async def measure_footprint(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    commands, creates, idle, points = (3000, 60, 30, 10) if quick else (100_000, 1000, 150, POINTS)
    async with serving(scratch / "footprint", COLD + MANY) as daemon:
        runtimes = await daemon.runtimes()
        runtime = "native" if "native" in runtimes else runtimes[0]  # the daemon's part is the same
        sessions = [await daemon.create(runtime) for _ in range(CLIENTS)]
        await daemon.settle()  # it loads what MCP needs in the background

        async def command(number: int) -> None:
            await execute(daemon, sessions[number % CLIENTS])

        async def come_and_go(_: int) -> None:
            await daemon.destroy(await daemon.create(runtime))

        yield halve(
            f"{runtime}: daemon's memory, second half of many commands", await sample(daemon, command, commands, points)
        )
        yield halve(
            f"{runtime}: daemon's memory, second half of many sessions",
            await sample(daemon, come_and_go, creates, points),
        )
    for each in runtimes:
        # A daemon of its own: what earlier sessions have left free would be used first.
        async with serving(scratch / f"footprint-{each}", COLD + MANY) as daemon:
            count = idle if each == "native" else idle // 3
            yield await measure_idle_sessions(daemon, each, count, min(points, 30, count))
