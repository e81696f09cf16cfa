"""The responses of a registry: read within limits, and requested again where that may help."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

from k8e.engine import EngineError
from k8e.engine.reference import split_host

T = TypeVar("T")

PAUSE: Final = 0.5  # seconds before the second attempt; doubled for each that follows
ATTEMPTS: Final = 5
_LONGEST_PAUSE: Final = 30.0


class Transient(Exception):
    """It may work the next time. `after` are seconds, where the registry said so; `attempts` how often it is worth it
    in all."""

    def __init__(self, error: EngineError, after: float = 0.0, attempts: int = ATTEMPTS) -> None:
        self.error = error
        self.after = after
        self.attempts = attempts
        super().__init__(str(error))


@dataclass(frozen=True, slots=True)
class Response:
    """Its body is still to be read."""

    status: int
    headers: Mapping[str, str]
    pieces: Callable[[], AsyncIterator[bytes]]


async def retry(work: Callable[[], Awaitable[T]], pause: float = PAUSE) -> T:
    """Until it works, or has failed often enough."""
    for attempt in range(ATTEMPTS):
        try:
            return await work()
        except Transient as error:
            wait = max(error.after, pause * 2**attempt * random.uniform(1, 1.5))
            if attempt >= error.attempts - 1 or wait > _LONGEST_PAUSE:
                raise error.error from error
            await asyncio.sleep(wait)
    raise AssertionError("unreachable")


async def read_capped(response: Response, limit: int, what: str) -> bytes:
    content = bytearray()
    async for piece in response.pieces():
        content += piece
        if len(content) > limit:
            raise EngineError("image", f"the registry's {what} has more than {limit} bytes", reason="refused")
    return bytes(content)


def read_pause(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def host_of(url: str) -> str:
    return split_host(urlsplit(url).netloc.rpartition("@")[2])[0]


def unreachable(host: str, error: Exception) -> EngineError:
    words = str(error) or type(error).__name__
    hint = "Is the network up, and the registry's name right? What was downloaded is kept: try again."
    return EngineError("image", f"{host} cannot be reached: {words[:300]}", hint, reason="unreachable")
