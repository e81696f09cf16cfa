"""The gateway: a command over gRPC and TLS beside the same over the unix socket, alone and in a crowd; and Python
through the SDK. The runtime's own fork and exec is measured inside the sandbox, by a process that is there already."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.crowd import execute
from bench.daemon import Daemon, serving
from bench.runs import HOST_PYTHON, PAUSE
from bench.samples import Measure, measure_pairs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sdk" / "python"))

from sandbox_client import AsyncSandboxClient

SETTINGS = '[gateway]\nlisten = "127.0.0.1:0"\n'
# Milliseconds of each, as JSON.
SPAWN = """
import json, os, time
taken = []
for _ in range(%d):
    started = time.perf_counter()
    os.waitpid(os.posix_spawn("/usr/bin/true", ["true"], {}), 0)
    taken.append((time.perf_counter() - started) * 1000)
print(json.dumps(taken))
"""
TRUE = ["/usr/bin/true"]


@contextmanager
def environment(daemon: Daemon) -> Iterator[None]:
    """Sets the variable by which the SDK finds its gateway."""
    before = os.environ.get("K8E_RUN_DIR")
    os.environ["K8E_RUN_DIR"] = str(daemon.folder / "run")
    try:
        yield
    finally:
        os.environ.pop("K8E_RUN_DIR") if before is None else os.environ.update(K8E_RUN_DIR=before)


async def measure_exec(daemon: Daemon, client: AsyncSandboxClient, session: str, runtime: str, count: int) -> Measure:
    """Alternates by tens; the program that forks inside is started first."""
    ours: list[float] = []
    inside: list[float] = []
    await client.exec(session, TRUE)
    for _ in range(count // 10):
        for _ in range(10):
            started = time.perf_counter()
            await client.exec(session, TRUE)
            ours.append((time.perf_counter() - started) * 1000)
        inside += json.loads((await daemon.run(session, SPAWN % 10, "python", timeout=120))["stdout"])
    name = f"{runtime}: exec true over gRPC and TLS"
    return Measure(name, "ms", tuple(ours), "fork+exec true, inside", tuple(inside))


async def measure_cpu(
    daemon: Daemon, client: AsyncSandboxClient, session: str, runtime: str, count: int
) -> list[Measure]:
    """Measures the daemon's CPU time for each `true`, over the socket and over gRPC, by turns of fifty."""
    turns: dict[str, Callable[[], Awaitable[object]]] = {
        "the unix socket": lambda: execute(daemon, session),
        "gRPC and TLS": lambda: client.exec(session, TRUE),
    }
    taken: dict[str, list[float]] = {way: [] for way in turns}
    for _ in range(count):
        for way, call in turns.items():
            before = read_cpu(daemon.process.pid)
            for _ in range(50):
                await call()
            taken[way].append((read_cpu(daemon.process.pid) - before) / 50)
    return [Measure(f"{runtime}: daemon's CPU per true, {way}", "ms", tuple(some)) for way, some in taken.items()]


def read_cpu(pid: int) -> float:
    """Milliseconds so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def measure_crowd(
    daemon: Daemon, client: AsyncSandboxClient, session: str, runtime: str, clients: int, count: int
) -> Measure:
    """`clients` that each send one command after the other, by turns over gRPC and over the unix socket."""

    async def call() -> float:
        started = time.perf_counter()
        await client.exec(session, TRUE)
        return (time.perf_counter() - started) * 1000

    async def several_calls() -> list[float]:
        return [await call() for _ in range(count)]

    async def several_requests() -> list[float]:
        return [await execute(daemon, session) for _ in range(count)]

    over_grpc = [each for some in await asyncio.gather(*(several_calls() for _ in range(clients))) for each in some]
    over_socket = [
        each for some in await asyncio.gather(*(several_requests() for _ in range(clients))) for each in some
    ]
    name = f"{runtime}: exec true over gRPC, {clients} clients"
    return Measure(name, "ms", tuple(over_grpc), "over the unix socket", tuple(over_socket))


async def measure_python(client: AsyncSandboxClient, session: str, runtime: str, count: int) -> Measure:
    async def ours() -> None:
        await client.exec(session, "print(1)", language="python")

    async def on_the_host() -> None:
        argv = [HOST_PYTHON, "-c", "print(1)"]
        await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)

    samples = await measure_pairs(count // 3, ours, on_the_host, pause=PAUSE)
    return Measure(f"{runtime}: run print(1), python, SDK", "ms", samples[0], "the same on the host", samples[1])


async def measure_haste(client: AsyncSandboxClient, session: str, runtime: str, callers: int, count: int) -> Measure:
    """The same back to back, without a pause in which an interpreter could get ready; by turns with paused ones."""

    async def call() -> float:
        started = time.perf_counter()
        await client.exec(session, "print(1)", language="python")
        return (time.perf_counter() - started) * 1000

    async def several() -> list[float]:
        return [await call() for _ in range(10)]

    hasty: list[float] = []
    paused: list[float] = []
    for _ in range(max(1, count // 10)):
        for some in await asyncio.gather(*(several() for _ in range(callers))):
            hasty += some
        for _ in range(10):
            await asyncio.sleep(PAUSE)
            paused.append(await call())
    who = "one caller" if callers == 1 else f"{callers} callers"
    name = f"{runtime}: run print(1), python, SDK, back to back, {who}"
    return Measure(name, "ms", tuple(hasty), "the same with pauses", tuple(paused))


async def measure_gateway(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 40 if quick else 200
    async with serving(scratch / "grpc", SETTINGS) as daemon:
        with environment(daemon):
            async with AsyncSandboxClient() as client:
                for runtime in await daemon.runtimes():
                    session = await daemon.create(runtime)
                    yield await measure_exec(daemon, client, session, runtime, count)
                    yield await measure_python(client, session, runtime, count)
                    for callers in (1, 4):
                        yield await measure_haste(client, session, runtime, callers, 10 if quick else 40)
                    for measure in await measure_cpu(daemon, client, session, runtime, 3 if quick else 30):
                        yield measure
                    for clients in (1, 10, 100):
                        each = max(1, count // clients)
                        yield await measure_crowd(daemon, client, session, runtime, clients, each)
                    await daemon.destroy(session)
