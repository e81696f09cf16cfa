"""Measures commands of many clients at once: how many a second, how long each takes, and the daemon's own CPU time for
one, over the unix socket and over gRPC, by turns. The clients are spread over ten sessions.

The baseline is a loop of fork and exec inside: one, or one in each session, all within the same moments.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from bench.crowd import execute
from bench.daemon import Daemon, read_cpu, serving
from bench.gateway import SETTINGS, TRUE, environment
from bench.samples import Measure
from sandbox_client import AsyncSandboxClient

CLIENTS = {1: 30, 10: 5, 50: 2}  # and how many commands each sends in a turn
SESSIONS = 10
SOCKET, GRPC = "the unix socket", "gRPC and TLS"
WINDOW = 0.3  # seconds
# Counts what it has started in each window, from the moment given on.
LOOP = """
import json, os, time
start, window, count = %r, %r, %d
counts = []
time.sleep(max(0, start - time.time()))
for number in range(count):
    done = 0
    while time.time() < start + window * (number + 1):
        os.waitpid(os.posix_spawn("/usr/bin/true", ["true"], {}), 0)
        done += 1
    counts.append(done)
print(json.dumps(counts))
"""

Call = Callable[[str], Awaitable[object]]


class Bench:
    """The samples of one runtime, by the name of the measure."""

    def __init__(self, daemon: Daemon, client: AsyncSandboxClient, runtime: str, sessions: list[str]) -> None:
        self.daemon = daemon
        self.runtime = runtime
        self.sessions = sessions
        self.ways: dict[str, Call] = {
            SOCKET: lambda session: execute(daemon, session),
            GRPC: lambda session: client.exec(session, TRUE),
        }
        self.rates: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.times: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.daemon_cpu: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.machine_cpu: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.loops: dict[int, list[float]] = defaultdict(list)  # by how many loops: starts a second

    async def take_turn(self, clients: int, way: str) -> None:
        call, each, key = self.ways[way], CLIENTS[clients], (clients, way)

        async def work(number: int) -> None:
            session = self.sessions[number % len(self.sessions)]
            for _ in range(each):
                began = time.perf_counter()
                await call(session)
                self.times[key].append((time.perf_counter() - began) * 1000)

        cpu, machine, started = read_cpu(self.daemon.process.pid), read_machine_cpu(), time.perf_counter()
        await asyncio.gather(*map(work, range(clients)))
        count = clients * each
        self.rates[key].append(count / (time.perf_counter() - started))
        self.daemon_cpu[key].append((read_cpu(self.daemon.process.pid) - cpu) / count)
        self.machine_cpu[key].append((read_machine_cpu() - machine) / count)

    async def count_bare(self, loops: int, windows: int) -> None:
        code = LOOP % (time.time() + 1.5, WINDOW, windows)
        runs = [self.daemon.run(session, code, "python", timeout=120) for session in self.sessions[:loops]]
        counts = [json.loads(result["stdout"]) for result in await asyncio.gather(*runs)]
        self.loops[loops] += [sum(some) / WINDOW for some in zip(*counts, strict=True)]

    def measures(self) -> list[Measure]:
        found = []
        forks = tuple(1000 / rate for rate in self.loops[1] if rate)
        for (clients, way), rates in self.rates.items():
            about = f"{clients} client{'s' if clients > 1 else ''}, {way}"
            loops = 1 if clients == 1 else SESSIONS
            floor = f"fork+exec inside, {loops} loop{'s' if loops > 1 else ''}"
            name = f"{self.runtime}: true per second, {about}"
            found.append(Measure(name, "per second", tuple(rates), floor, tuple(self.loops[loops]), better="more"))
            other = tuple(self.times[clients, SOCKET]) if way == GRPC else ()
            name = f"{self.runtime}: true, {about}"
            found.append(Measure(name, "ms", tuple(self.times[clients, way]), SOCKET if other else "", other))
            name = f"{self.runtime}: daemon's CPU per true, {about}"
            found.append(Measure(name, "ms", tuple(self.daemon_cpu[clients, way]), "fork+exec inside", forks))
            name = f"{self.runtime}: machine's CPU per true, {about}"
            found.append(Measure(name, "ms", tuple(self.machine_cpu[clients, way])))
        return found


def read_machine_cpu() -> float:
    """Milliseconds so far of all processors, without this process, which is the client."""
    own = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) * 1000
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
    return (user + nice + system + irq + softirq) * 1000 / os.sysconf("SC_CLK_TCK") - own


async def measure_runtime(
    daemon: Daemon, client: AsyncSandboxClient, runtime: str, blocks: int, turns: int
) -> AsyncIterator[Measure]:
    sessions = list(await asyncio.gather(*(daemon.create(runtime) for _ in range(SESSIONS))))
    bench = Bench(daemon, client, runtime, sessions)
    for call in bench.ways.values():  # what the first one prepares does not count
        await asyncio.gather(*map(call, sessions))
    await daemon.settle()
    for _ in range(blocks):
        for clients in CLIENTS:
            for _ in range(turns):
                for way in bench.ways:
                    await bench.take_turn(clients, way)
        for loops in (1, SESSIONS):
            await bench.count_bare(loops, turns)
    for measure in bench.measures():
        yield measure
    await asyncio.gather(*map(daemon.destroy, sessions))


async def measure_throughput(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    blocks, turns = (1, 3) if quick else (3, 10)
    async with serving(scratch / "throughput", SETTINGS) as daemon:
        with environment(daemon):
            async with AsyncSandboxClient() as client:
                for runtime in await daemon.runtimes():
                    async for measure in measure_runtime(daemon, client, runtime, blocks, turns):
                        yield measure
