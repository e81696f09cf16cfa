"""Measures virtual machines (`kata`): from create to the end of the first command, which part of it is the guest's
kernel's and which is ours, and the memory of an idle one. Emulated, unless KVM works here: some ten times slower.

Ours is what the guest's first process does, from its start to the agent's (modules, root, network, agent), by its own
trace; the baseline is the time of the kernel before that, in the same boots.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from bench.samples import Measure
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.runtime import VmOptions
from k8e.link.model import ExecSpec
from tests.engine.answers import plant_answers
from tests.engine.vm.guests import find_guest

LIMITS = Limits(cpus=1.0, memory=256 << 20, pids=256, disk=128 << 20, inodes=16_384)
SAMPLES = 30
MARK = re.compile(r"(\w+)=(\d+)")
STEPS = ("init", "modules", "root", "network", "agent")


async def boot(engine: LocalEngine, name: str, spec: SandboxSpec) -> tuple[float, dict[str, float], float]:
    """Seconds to the end of the first command; the guest's trace in milliseconds; MiB when idle."""
    began = time.perf_counter()
    await engine.create(name, spec)
    try:
        sandbox, place = await engine.attach(name)
        done = await (await sandbox.start(ExecSpec((b"/usr/bin/true",), place.env, stdin=False))).wait()
        seconds = time.perf_counter() - began
        assert done.exit_code == 0, done
        await engine.observe(name)  # which asks for the trace
        trace = {step: int(us) / 1000 for step, us in MARK.findall(await engine.boot_trace(name))}
        await asyncio.sleep(1)
        return seconds, trace, (await engine.measure(name)).memory / (1 << 20)
    finally:
        await engine.destroy(name)


async def measure_machines(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    plant_answers(scratch / "s")
    engine = LocalEngine(scratch / "s", scratch / "r", virtual=VmOptions(await find_guest(), emulation=True))
    try:
        report = await engine.choose(Runtime.KATA)
        if not report.available:
            raise RuntimeError(report.reason)
        how = "emulated" if report.emulated else "KVM"
        spec = SandboxSpec(Runtime.KATA, limits=LIMITS)
        boots = [await boot(engine, f"boot-{number}", spec) for number in range(5 if quick else SAMPLES)]
        more = replace(spec, limits=replace(LIMITS, memory=LIMITS.memory * 2))
        larger = [(await boot(engine, f"large-{number}", more))[2] for number in range(2 if quick else 5)]
    finally:
        with contextlib.suppress(Exception):
            for name in await engine.list():
                await engine.destroy(name)
        await engine.close()
    traces = [trace for _, trace, _ in boots]
    yield Measure(f"kata, {how}: create and first command", "ms", tuple(seconds * 1000 for seconds, _, _ in boots))
    kernel = tuple(trace["init"] for trace in traces)
    ours = tuple(trace["agent"] - trace["init"] for trace in traces)
    yield Measure(f"kata, {how}: guest, ours", "ms", ours, "the kernel's before it", kernel)
    for before, step in itertools.pairwise(STEPS):
        yield Measure(f"kata, {how}: guest, {step}", "ms", tuple(trace[step] - trace[before] for trace in traces))
    yield Measure(f"kata, {how}: idle memory of one with 256 MiB", "MiB", tuple(idle for _, _, idle in boots))
    yield Measure(f"kata, {how}: idle memory of one with 512 MiB", "MiB", tuple(larger))
