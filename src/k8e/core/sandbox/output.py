"""Output within bounds: the first half and the last half of each stream, and exactly how much there was.

Output of a command in the background is read without acknowledging it: all of it stays with the agent, and can be read
again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from k8e.core.model import OUTPUT_LIMIT
from k8e.link.errors import LinkLost
from k8e.link.model import ByteReader, CommandInfo, Outcome, Sandbox

_ATTEMPTS: Final = 3


class HeadTail:
    """Takes a stream of any length, in pieces of any size, and keeps at most `limit` bytes of it."""

    def __init__(self, limit: int = OUTPUT_LIMIT) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._head_room = limit - limit // 2
        self._tail = bytearray()
        self._tail_limit = limit // 2

    def feed(self, content: bytes) -> None:
        self.total += len(content)
        if self._head_room:
            kept = content[: self._head_room]
            self._head += kept
            self._head_room -= len(kept)
            content = content[len(kept) :]
        self._tail += content[max(0, len(content) - self._tail_limit) :]
        # Cut rarely: each cut moves what stays.
        if len(self._tail) > 2 * self._tail_limit:
            self._cut_tail()

    def _cut_tail(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def truncated(self) -> bool:
        return self.total > self._limit

    def take(self) -> bytes:
        self._cut_tail()
        return bytes(self._head + self._tail)


def cut_before(kept: bytes, total: int, start: int) -> bytes:
    """Of a stream of `total` bytes, of which `kept` are there (the first and the last half), those from `start` on."""
    if len(kept) >= total:
        return kept[start:]
    head = min(len(kept), OUTPUT_LIMIT - OUTPUT_LIMIT // 2)
    tail = kept[head:]
    return kept[start:head] + tail[max(0, start - (total - len(tail))) :]


async def read_into(reader: ByteReader, output: HeadTail) -> None:
    while content := await reader.read():
        output.feed(content)


async def read_so_far(sandbox: Sandbox, info: CommandInfo) -> tuple[bytes, bytes]:
    """Both streams of a command that runs, as far as it had come when `info` was asked for."""
    process = await sandbox.attach(info.id, hold=True)
    try:
        return (
            await _read_up_to(process.stdout, info.stdout_bytes),
            await _read_up_to(process.stderr, info.stderr_bytes),
        )
    finally:
        await process.detach()


async def _read_up_to(reader: ByteReader, end: int) -> bytes:
    output = HeadTail()
    while reader.position < end and (content := await reader.read()):
        output.feed(content[: len(content) - max(0, reader.position - end)])
    return output.take()


async def read_all(sandbox: Sandbox, command: int) -> tuple[Outcome, bytes, bytes]:
    """The outcome and both streams of a command that has ended. A connection that breaks is replaced; a link that is
    gone for good says so at the next attempt."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _read_all(sandbox, command)
        except LinkLost:
            continue
    return await _read_all(sandbox, command)


async def _read_all(sandbox: Sandbox, command: int) -> tuple[Outcome, bytes, bytes]:
    process = await sandbox.attach(command, hold=True)
    stdout, stderr = HeadTail(), HeadTail()
    await asyncio.gather(read_into(process.stdout, stdout), read_into(process.stderr, stderr))
    return await process.wait(), stdout.take(), stderr.take()
