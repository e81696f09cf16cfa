"""Decoys: files, a process and a listener on the machine for a moment, which no sandbox must be able to see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
_PREFIX = "k8e-decoy-"


@dataclass(frozen=True, slots=True)
class Decoys:
    token: str  # the name of a file in several places, and an argument of a process
    port: int  # of a listener on the machine's loopback


@contextlib.asynccontextmanager
async def plant_decoys(*folders: Path) -> AsyncIterator[Decoys]:
    await asyncio.to_thread(_remove_forgotten)
    token = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    with (
        _plant_files(token, [*folders, *_FOLDERS]),
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener,
    ):
        # Waits for a line that never comes, and ends with its input: also when we are killed.
        process = await asyncio.create_subprocess_exec("sh", "-c", "read line", token, stdin=asyncio.subprocess.PIPE)
        try:
            yield Decoys(token, listener.getsockname()[1])
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


@contextlib.contextmanager
def _plant_files(token: str, folders: Sequence[Path]) -> Iterator[None]:
    planted = []
    try:
        for folder in folders:
            with contextlib.suppress(OSError):
                (folder / token).write_text("a file of the machine\n")
                planted.append(folder / token)
        yield
    finally:
        for path in planted:
            path.unlink(missing_ok=True)


def _remove_forgotten() -> None:
    """Removes those of a doctor that was killed before it could."""
    for path in (path for folder in _FOLDERS for path in folder.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{owner}"):
            path.unlink(missing_ok=True)
