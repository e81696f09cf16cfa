"""One command as a whole process, the way a shell or an agent types it: ours in a session that is there, others in a
fresh sandbox each (their end counted, as it is in `agentkernel`), a bare interpreter beside them. All in turn, so that
a noisy moment hits all alike."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.baselines import OneShot, bubblewrap, podman, sandbox_runtime
from bench.daemon import serving
from bench.programs import BARE_PYTHON, install_program
from bench.samples import Measure
from k8e.engine.local.runtime.runtime import OWN_BINARIES

BARE = OneShot(f"{BARE_PYTHON} -c pass", (BARE_PYTHON, "-c", "pass"))


def take(shot: OneShot) -> float:
    started = time.perf_counter()
    subprocess.run(
        shot.argv,
        env=os.environ | dict(shot.env),
        cwd=shot.cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return (time.perf_counter() - started) * 1000


async def measure_in_turn(shots: Sequence[OneShot], count: int) -> dict[str, tuple[float, ...]]:
    taken: dict[str, list[float]] = {shot.name: [] for shot in shots}
    for number in range(count + 1):
        for shot in shots:
            spent = await asyncio.to_thread(take, shot)
            if number:
                taken[shot.name].append(spent)
    return {name: tuple(samples) for name, samples in taken.items()}


async def measure_oneshots(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    own = OWN_BINARIES / "runsc"
    k8e = install_program("k8e")
    others = [bubblewrap(), *podman(str(own) if own.exists() else None), *sandbox_runtime()]
    async with serving(scratch / "cli") as daemon:
        ours = []
        changed = tuple((key, value) for key, value in daemon.environment.items() if os.environ.get(key) != value)
        for runtime in await daemon.runtimes():
            session = await daemon.create(runtime)
            for language, code in (("bash", "true"), ("python", "print(1)")):
                name = f"{runtime}: k8e sandbox run {code}"
                argv = (k8e, "sandbox", "run", code, "--lang", language, "--session-id", session)
                ours.append(OneShot(name, argv, changed))
        taken = await measure_in_turn([BARE, *ours, *others], 10 if quick else 40)
    for shot in (*ours, *others):
        yield Measure(shot.name, "ms", taken[shot.name], BARE.name, taken[BARE.name])
