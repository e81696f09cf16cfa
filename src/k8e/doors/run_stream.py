"""Streams a run: the client's stdin to the command, the command's output to the client. Every door uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from k8e.core.contract import LiveOutput
from k8e.core.errors import Fault
from k8e.core.model import Chunk, RunResult


async def stream_run(
    live: LiveOutput,
    send: Callable[[Chunk], Awaitable[None]],
    *,
    stdin: AsyncGenerator[bytes, None] | None = None,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> RunResult:
    """Returns when the command has ended. `begin` is awaited before the first `send`. After any error the run is left
    (`kill`): that ends a command, and not that of a terminal."""
    feeder = _Feeder(live, stdin)
    feeding = asyncio.create_task(feeder.feed())
    result: RunResult | None = None
    try:
        if begin is not None:
            await begin()
        async for chunk in live.output():
            await send(chunk)
        result = await live.result()
    except Fault:
        if feeder.failure is not None:  # that is why the run was left
            raise feeder.failure from None
        raise
    finally:
        feeding.cancel()
        if result is None:
            await live.kill()
    await asyncio.wait({feeding})
    if feeder.failure is not None:
        raise feeder.failure
    return result


class _Feeder:
    """Writes the client's stdin to a command. Incomplete input kills it, because no caller asked for a run with half of
    its input."""

    def __init__(self, live: LiveOutput, stdin: AsyncGenerator[bytes, None] | None) -> None:
        self.failure: Exception | None = None
        self._live = live
        self._stdin = stdin

    async def feed(self) -> None:
        try:
            if self._stdin is not None:
                async with aclosing(self._stdin) as pieces:
                    async for piece in pieces:
                        await self._live.write_stdin(piece)
            await self._live.close_stdin()
        except Exception as error:  # noqa: BLE001 - stream_run raises it
            self.failure = error
            await self._live.kill()
