"""Programs back to back, without a pause in which an interpreter could get ready, beside the same with pauses: for one
caller and for four at once in one session."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator

from bench.runs import PAUSE, PROGRAMS
from bench.samples import Measure
from sandbox_client import AsyncSandboxClient

ROW = 10  # programs of each caller between two rows of paused ones


async def measure_haste(
    client: AsyncSandboxClient, session: str, runtime: str, language: str, callers: int, rows: int
) -> list[Measure]:
    """By turns: a row without pauses, then as many paused ones, of all callers at once and of one alone."""
    code, _ = PROGRAMS[language]

    async def call() -> float:
        started = time.perf_counter()
        await client.exec(session, code, language=language)
        return (time.perf_counter() - started) * 1000

    async def call_in_a_row() -> list[float]:
        return [await call() for _ in range(ROW)]

    hasty: list[float] = []
    paused: list[float] = []
    alone: list[float] = []
    for row in range(rows + 1):
        some = await asyncio.gather(*(call_in_a_row() for _ in range(callers)))
        if not row:
            continue  # in the first one it turns out how many run at once
        hasty += [each for one in some for each in one]
        for _ in range(ROW):
            await asyncio.sleep(PAUSE)
            alone.append(await call())
            if callers > 1:
                await asyncio.sleep(PAUSE)
                paused += await asyncio.gather(*(call() for _ in range(callers)))
    name = f"{runtime}: run {code}, {language}, SDK, back to back"
    if callers == 1:
        return [Measure(f"{name}, one caller", "ms", tuple(hasty), "the same with pauses", tuple(alone))]
    return [
        Measure(f"{name}, {callers} callers", "ms", tuple(hasty), "one caller with pauses", tuple(alone)),
        Measure(f"{name}, {callers} beside {callers}", "ms", tuple(hasty), "as many with pauses", tuple(paused)),
    ]


async def measure_all_haste(
    client: AsyncSandboxClient, session: str, runtime: str, quick: bool
) -> AsyncIterator[Measure]:
    for language, (_, argv) in PROGRAMS.items():
        if shutil.which(argv[0]):
            for callers in (1, 4):
                for measure in await measure_haste(client, session, runtime, language, callers, 1 if quick else 3):
                    yield measure
