"""The daemon loads the SDK in a quiet moment, not while commands run."""

from __future__ import annotations

import asyncio

from k8e.doors.mcp.endpoint import wait_quiet


async def work_until(enough: asyncio.Event) -> None:
    while not enough.is_set():
        sum(range(10_000))
        await asyncio.sleep(0)


async def test_quiet_is_when_there_is_nothing_to_do() -> None:
    enough = asyncio.Event()
    working, waiting = asyncio.create_task(work_until(enough)), asyncio.create_task(wait_quiet(0.1))
    done, _ = await asyncio.wait([waiting], timeout=1)
    assert not done, "it is busy all the time"
    enough.set()
    await working
    await waiting
