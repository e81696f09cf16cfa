"""The gateway: a command over gRPC and TLS, and Python through the SDK, with pauses and back to back. The runtime's own
fork and exec is measured inside the sandbox, by a process that is there already. Many clients: `throughput`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.daemon import Daemon, serving
from bench.runs import HOST_PYTHON, PAUSE
from bench.samples import Measure, measure_pairs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sdk" / "python"))

from bench.haste import measure_all_haste
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


async def measure_python(client: AsyncSandboxClient, session: str, runtime: str, count: int) -> Measure:
    async def ours() -> None:
        await client.exec(session, "print(1)", language="python")

    async def on_the_host() -> None:
        argv = [HOST_PYTHON, "-c", "print(1)"]
        await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)

    samples = await measure_pairs(count // 5, ours, on_the_host, pause=PAUSE)
    return Measure(f"{runtime}: run print(1), python, SDK", "ms", samples[0], "the same on the host", samples[1])


async def measure_gateway(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 40 if quick else 200
    async with serving(scratch / "grpc", SETTINGS) as daemon:
        with environment(daemon):
            async with AsyncSandboxClient() as client:
                for runtime in await daemon.runtimes():
                    session = await daemon.create(runtime)
                    yield await measure_exec(daemon, client, session, runtime, count)
                    yield await measure_python(client, session, runtime, count)
                    async for measure in measure_all_haste(client, session, runtime, quick):
                        yield measure
                    await daemon.destroy(session)
