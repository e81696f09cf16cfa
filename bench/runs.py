"""Code in a session that is there, over a connection that is there: what an agent waits for all day."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from bench.daemon import Daemon, serving
from bench.samples import Measure, measure_pairs

PAUSE = 0.4
HOST_PYTHON = "/usr/bin/python3"  # the one that sandboxes have
PROGRAMS = {
    "bash": ("true", ("/bin/bash", "-c", "true")),
    "python": ("print(1)", (HOST_PYTHON, "-c", "print(1)")),
    "node": ("console.log(1)", ("node", "-e", "console.log(1)")),
}


async def measure_language(daemon: Daemon, runtime: str, language: str, count: int) -> Measure:
    code, argv = PROGRAMS[language]
    session = await daemon.create(runtime)

    async def ours() -> None:
        await daemon.run(session, code, language)

    async def on_the_host() -> None:
        await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)

    samples = await measure_pairs(count, ours, on_the_host, pause=PAUSE)
    await daemon.destroy(session)
    return Measure(f"{runtime}: run {code}, {language}", "ms", samples[0], "the same on the host", samples[1])


async def measure_runs(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 15 if quick else 40
    async with serving(scratch / "runs") as daemon:
        for runtime in await daemon.runtimes():
            for language, (_, argv) in PROGRAMS.items():
                if shutil.which(argv[0]):
                    yield await measure_language(daemon, runtime, language, count)
