"""A command whose client watches: what the client sends goes in, what the command writes comes out, until both ends
are reached. The same for every door that has streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from k8e.core.contract import LiveRun
from k8e.core.model import Chunk, RunResult


async def stream_run(
    live: LiveRun,
    stdin: AsyncGenerator[bytes, None],
    begin: Callable[[], Awaitable[None]],
    send: Callable[[Chunk], Awaitable[None]],
) -> RunResult:
    """`begin` is awaited before the first output is sent. Whatever goes wrong on the way ends the command."""
    feeder = _Feeder(live, stdin)
    feeding = asyncio.create_task(feeder.feed())
    result: RunResult | None = None
    try:
        await begin()
        async for chunk in live.output():
            await send(chunk)
        result = await live.result()
    finally:
        feeding.cancel()
        if result is None:
            await live.kill()
    await asyncio.wait({feeding})
    if feeder.failure is not None:
        raise feeder.failure
    return result


class _Feeder:
    """Hands the client's stdin to a command. Input that is not whole ends it: running with half was not asked for."""

    def __init__(self, live: LiveRun, stdin: AsyncGenerator[bytes, None]) -> None:
        self.failure: Exception | None = None
        self._live = live
        self._stdin = stdin

    async def feed(self) -> None:
        try:
            async with aclosing(self._stdin) as pieces:
                async for piece in pieces:
                    await self._live.write_stdin(piece)
            await self._live.close_stdin()
        except Exception as error:  # noqa: BLE001 - told to the client by whoever waits for the command
            self.failure = error
            await self._live.kill()
