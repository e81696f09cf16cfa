"""The download of a blob. Half of one is kept, and continued by the next pull from the same registry: another registry
could be slow on purpose, or send wrong bytes.

Bytes count when all of them together have the right digest. When they have not, and some were there before, it is tried
once more from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any, Final

from k8e.engine import EngineError
from k8e.engine.local.images.layers import refused
from k8e.engine.local.images.manifest import Descriptor
from k8e.engine.local.images.registry import Registry
from k8e.engine.local.images.responses import Transient, retry, unreachable

_PIECE: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", re.ASCII)


class Partial:
    """The bytes of a blob that are there, and their hash so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # against `Store.retain`
        self._hash: Any = hashlib.sha256()
        self.size = 0

    def resume(self, most: int) -> None:
        """Reads what is there; more than the blob has is thrown away."""
        if os.fstat(self._file.fileno()).st_size > most:
            self.restart()
            return
        while piece := self._file.read(_PIECE):
            self._hash.update(piece)
            self.size += len(piece)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash, self.size = hashlib.sha256(), 0

    def append(self, piece: bytes) -> None:
        self._file.write(piece)
        self._hash.update(piece)
        self.size += len(piece)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def file(self) -> IO[bytes]:
        self._file.flush()
        return self._file


def partial_name(host: str, digest: str) -> str:
    return f"{digest.removeprefix('sha256:')}-{hashlib.sha256(host.encode()).hexdigest()[:16]}"


@contextlib.asynccontextmanager
async def downloaded(
    registry: Registry, blob: Descriptor, folder: Path, tell: Callable[[int], None]
) -> AsyncIterator[IO[bytes]]:
    """All of it, checked, until the end of the block. `tell` is called with the number of bytes that are there."""
    partial = await asyncio.to_thread(Partial, folder / partial_name(registry.host, blob.digest))
    try:
        await asyncio.to_thread(partial.resume, blob.size)
        earlier = partial.size
        await fetch(registry, blob, partial, tell)
        if partial.digest != blob.digest and earlier:
            await asyncio.to_thread(partial.restart)
            await fetch(registry, blob, partial, tell)
        if partial.digest != blob.digest:
            partial.remove()
            raise refused(f"what the registry sends as {blob.digest} is something else")
        yield partial.file
        partial.remove()
    finally:
        await asyncio.to_thread(partial.close)


async def fetch(registry: Registry, blob: Descriptor, partial: Partial, tell: Callable[[int], None]) -> None:
    """To its full size, in as many attempts as it takes, as long as each brings something."""
    tell(partial.size)
    while partial.size < blob.size:
        before = partial.size

        async def ask() -> None:
            await _fetch_once(registry, blob, partial, tell)

        try:
            await retry(ask, registry.pause)
        except EngineError as error:
            if error.reason == "unreachable" and partial.size > before:
                continue
            raise


async def _fetch_once(registry: Registry, blob: Descriptor, partial: Partial, tell: Callable[[int], None]) -> None:
    async with registry.blob(blob.digest, partial.size) as response:
        found = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status == 416 or (response.status == 206 and (found is None or int(found[1]) != partial.size)):
            await asyncio.to_thread(partial.restart)
            raise Transient(EngineError("image", "the registry does not continue what it began", reason="unreachable"))
        if response.status == 200 and partial.size:
            await asyncio.to_thread(partial.restart)
        try:
            async for piece in response.pieces():
                if partial.size + len(piece) > blob.size:
                    await asyncio.to_thread(partial.restart)
                    raise refused(f"the registry sends more than the {blob.size} bytes of {blob.digest}")
                await asyncio.to_thread(partial.append, piece)
                tell(partial.size)
        finally:
            partial.flush()
    if partial.size < blob.size:
        raise Transient(
            unreachable("the registry", EOFError(f"the connection ended {blob.size - partial.size} bytes early"))
        )
