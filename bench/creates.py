"""Sandboxes that were not there: from the pool, cold, and many at once; until the first command has answered. What a
sandbox's end takes is counted neither of ours nor of the baselines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from bench.agent import time_first_words
from bench.baselines import bubblewrap
from bench.daemon import Daemon, read_cpu, serving
from bench.samples import Measure
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.link.model import ExecSpec

LIMITS = Limits(cpus=float(os.cpu_count() or 1))
WORDS = ("/usr/bin/echo", "1")
ECHO = ExecSpec.of(*WORDS, stdin=False)
COLD = "[pool]\nenabled = false\n"
MANY = "[quotas]\nsessions = 1000\ncpus = 1000.0\nmemory = 1099511627776\ncreates_per_minute = 100000\n"


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
    """Create and first command, against the bare runtime running the same in the same bundle on the same disk."""
    binary = engine.runtime(runtime)
    spec = SandboxSpec(runtime, limits=LIMITS)
    model = f"model-{runtime.value}"
    await engine.create(model, spec)
    bundle = scratch / f"bundle-{runtime.value}"
    make_bundle(engine, model, bundle, list(WORDS), "/k8e-bench/cold")
    words = (binary.binary, "--root", str(scratch / "bare"), *binary.flags, "run", "--bundle", str(bundle))
    ours, baseline = [], []
    try:
        for number in range(count):
            started = time.perf_counter()
            await engine.create(f"cold-{number}", spec)
            sandbox, _ = await engine.attach(f"cold-{number}")
            process = await sandbox.start(ECHO)
            assert await process.stdout.read() == b"1\n"
            ours.append((time.perf_counter() - started) * 1000)
            process.discard()
            await engine.destroy(f"cold-{number}")
            baseline.append(await time_first_words(*words, secrets.token_hex(4)))
    finally:
        await engine.destroy(model)
    name = os.path.basename(binary.binary)
    return Measure(
        f"{runtime.value}: create + first command, cold", "ms", tuple(ours), f"{name} run, same bundle", tuple(baseline)
    )


async def create_and_run(daemon: Daemon, runtime: str) -> tuple[str, float]:
    started = time.perf_counter()
    session = await daemon.create(runtime)
    await daemon.call("POST", f"/v1/sessions/{session}/runs", {"argv": list(WORDS)})
    return session, (time.perf_counter() - started) * 1000


async def measure_claims(daemon: Daemon, runtime: str, warm: int, count: int) -> Measure:
    """Each claim finds the pool full, and nothing else going on."""
    shot = bubblewrap(*WORDS)
    ours, baseline = [], []
    for _ in range(2):  # what the first one of a kind prepares is not a claim; from the second on the pool keeps some
        session, _ = await create_and_run(daemon, runtime)
        await daemon.destroy(session)
    for _ in range(count):
        await daemon.wait_warm(warm)
        session, spent = await create_and_run(daemon, runtime)
        ours.append(spent)
        await daemon.destroy(session)
        baseline.append(await time_first_words(*shot.argv))
    name = f"{runtime}: create + first command, from the pool"
    return Measure(name, "ms", tuple(ours), shot.name, tuple(baseline))


async def measure_cpu(daemon: Daemon, runtime: str, count: int) -> Measure:
    """Measures the daemon's own CPU time for a session that is created, cold, and destroyed, by turns of five; what the
    runtime takes is not in it."""
    await daemon.settle()
    taken = []
    for number in range(count + 1):
        before = read_cpu(daemon.process.pid)
        for _ in range(5):
            await daemon.destroy(await daemon.create(runtime))
        if number:  # what the first ones prepare is not theirs alone
            taken.append((read_cpu(daemon.process.pid) - before) / 5)
    return Measure(f"{runtime}: daemon's CPU per create and destroy, cold", "ms", tuple(taken))


async def measure_burst(daemon: Daemon, runtime: str, bare: Bare, count: int, rounds: int) -> Measure:
    """Measures that many creates at once, and as many bare starts of the runtime; each is timed from the moment when
    all were asked for."""
    ours: list[float] = []
    baseline: list[float] = []
    for _ in range(rounds):
        await daemon.settle()
        made = await asyncio.gather(*(create_and_run(daemon, runtime) for _ in range(count)))
        ours += [spent for _, spent in made]
        for session, _ in made:
            await daemon.destroy(session)
        baseline += await asyncio.gather(*(bare() for _ in range(count)))
    name = f"{runtime}: create + first command, {count} at once"
    return Measure(name, "ms", tuple(ours), f"{count} bare starts at once", tuple(baseline))


Bare = Callable[[], Awaitable[float]]


@contextlib.asynccontextmanager
async def bare_starts(scratch: Path, runtime: Runtime) -> AsyncIterator[Bare]:
    """The runtime alone, with a bundle of ours."""
    folder = scratch / f"bare-{runtime.value}"
    folder.mkdir(mode=0o711)
    engine = LocalEngine(folder / "state", folder / "run")
    await engine.probe()
    binary, model = engine.runtime(runtime), f"model-{runtime.value}"
    await engine.create(model, SandboxSpec(runtime, limits=LIMITS))
    words = (binary.binary, "--root", str(folder / "bare"), *binary.flags, "run", "--bundle")

    async def start() -> float:
        # In a cgroup of its own, as each of ours: a hundred under one sandbox's limits run out of memory.
        name = secrets.token_hex(4)
        make_bundle(engine, model, folder / name, list(WORDS), f"/k8e-bench/{name}")
        return await time_first_words(*words, str(folder / name), name)

    try:
        yield start
    finally:
        await engine.destroy(model)
        await engine.close()


async def measure_creates(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    engine = LocalEngine(scratch / "cold" / "state", scratch / "cold" / "run")
    (scratch / "cold").mkdir(mode=0o711)
    try:
        reports = [report for report in await engine.probe() if report.available]
        for report in reports:
            yield await measure_cold(engine, report.runtime, scratch, 5 if quick else 30)
    finally:
        for left in await engine.list():
            await engine.destroy(left)
        await engine.close()
    for report in reports:
        runtime = report.runtime.value
        async with serving(scratch / f"pool-{runtime}", pool_of(4)) as daemon:
            yield await measure_claims(daemon, runtime, 4, 10 if quick else 40)
        async with serving(scratch / f"cpu-{runtime}", COLD + MANY) as daemon:
            yield await measure_cpu(daemon, runtime, 6 if quick else 30)
        async with (
            serving(scratch / f"burst-{runtime}", MANY) as daemon,
            bare_starts(scratch, report.runtime) as bare,
        ):
            yield await measure_burst(daemon, runtime, bare, 20, 1 if quick else 3)
            if not quick:
                yield await measure_burst(daemon, runtime, bare, 100, 1)
