"""Sandboxes that were not there: from the pool, cold, and a hundred at once."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.agent import spawn
from bench.baselines import bubblewrap
from bench.daemon import Daemon, serving
from bench.samples import Measure
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.link.model import ExecSpec

LIMITS = Limits(cpus=float(os.cpu_count() or 1))
TRUE = ExecSpec.of("/usr/bin/true", stdin=False)
COLD = "[pool]\nenabled = false\n"


def pool_of(count: int) -> str:
    return f"[pool]\nmin = {count}\nmax = {count}\n"


def make_bundle(engine: LocalEngine, model: str, bundle: Path, argv: list[str], group: str) -> None:
    """The bundle of a sandbox that is there, for the bare runtime: another command, and a network namespace that is
    empty, because gVisor takes the addresses of the sandbox's own away with it."""
    config = json.loads((engine.layout.sandbox(model).bundle / "config.json").read_text())
    config["process"]["args"] = argv
    config["linux"]["cgroupsPath"] = group
    for namespace in config["linux"]["namespaces"]:
        if namespace["type"] == "network":
            namespace.pop("path", None)
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(config))


async def measure_cold(engine: LocalEngine, runtime: Runtime, scratch: Path, count: int) -> Measure:
    """Create and first command, against the bare runtime running `true` in the same bundle on the same disk."""
    binary = engine.runtime(runtime)
    spec = SandboxSpec(runtime, limits=LIMITS)
    model = f"model-{runtime.value}"
    await engine.create(model, spec)
    bundle = scratch / f"bundle-{runtime.value}"
    make_bundle(engine, model, bundle, ["/usr/bin/true"], "/k8e-bench/cold")

    async def bare() -> None:
        name = secrets.token_hex(4)
        await spawn(binary.binary, "--root", str(scratch / "bare"), *binary.flags, "run", "--bundle", str(bundle), name)

    ours, baseline = [], []
    try:
        for number in range(count):
            started = time.perf_counter()
            await engine.create(f"cold-{number}", spec)
            sandbox, _ = await engine.attach(f"cold-{number}")
            await (await sandbox.start(TRUE)).wait()
            ours.append((time.perf_counter() - started) * 1000)
            await engine.destroy(f"cold-{number}")
            started = time.perf_counter()
            await bare()
            baseline.append((time.perf_counter() - started) * 1000)
    finally:
        await engine.destroy(model)
    name = os.path.basename(binary.binary)
    return Measure(
        f"{runtime.value}: create + true, cold", "ms", tuple(ours), f"{name} run, same bundle", tuple(baseline)
    )


async def create_and_run(daemon: Daemon, runtime: str) -> tuple[str, float]:
    started = time.perf_counter()
    session = await daemon.create(runtime)
    await daemon.run(session, "true")
    return session, (time.perf_counter() - started) * 1000


async def measure_claims(daemon: Daemon, runtime: str, warm: int, count: int) -> Measure:
    """Each claim finds the pool full, and nothing else going on."""
    shot = bubblewrap()
    ours, baseline = [], []
    for _ in range(2):  # what the first one of a kind prepares is not a claim; from the second on the pool keeps some
        session, _ = await create_and_run(daemon, runtime)
        await daemon.destroy(session)
    for _ in range(count):
        await daemon.wait_warm(warm)
        session, spent = await create_and_run(daemon, runtime)
        ours.append(spent)
        await daemon.destroy(session)
        started = time.perf_counter()
        await spawn(*shot.argv)
        baseline.append((time.perf_counter() - started) * 1000)
    return Measure(f"{runtime}: create + true, from the pool", "ms", tuple(ours), shot.name, tuple(baseline))


async def measure_burst(daemon: Daemon, runtime: str, count: int) -> Measure:
    """That many at once; each is timed from the moment when all were asked for."""
    made = await asyncio.gather(*(create_and_run(daemon, runtime) for _ in range(count)))
    for session, _ in made:
        await daemon.destroy(session)
    return Measure(f"{runtime}: create + true, {count} at once", "ms", tuple(spent for _, spent in made))


async def measure_creates(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    engine = LocalEngine(scratch / "cold" / "state", scratch / "cold" / "run")
    (scratch / "cold").mkdir(mode=0o711)
    try:
        reports = [report for report in await engine.probe() if report.available]
        for report in reports:
            yield await measure_cold(engine, report.runtime, scratch, 5 if quick else 20)
    finally:
        for left in await engine.list():
            await engine.destroy(left)
        await engine.close()
    for report in reports:
        runtime = report.runtime.value
        async with serving(scratch / f"pool-{runtime}", pool_of(4)) as daemon:
            yield await measure_claims(daemon, runtime, 4, 10 if quick else 40)
        async with serving(scratch / f"burst-{runtime}") as daemon:
            yield await measure_burst(daemon, runtime, 20 if quick else 100)
