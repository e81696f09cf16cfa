"""The identity that all replicas share, in one Secret: the CA, and the register of API keys. (The key of the agents'
channel is there, too.) The first replica fills it; every other one finds it there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.kubernetes import SharedSecret
from k8e.identity.authority import Authority, replace_file

REGISTER: Final = "keys.json"
_CERTIFICATE, _KEY = "ca.crt", "ca.key"
_MOST: Final = 1_000_000  # bytes of a register: a Secret has 1 MiB
_PATIENCE: Final = 20.0


async def share_authority(secret: SharedSecret, folder: Path) -> None:
    """Puts the shared CA into this replica's files; where there is none yet, this replica's becomes it."""
    try:
        await asyncio.to_thread(Authority.open, folder, time.time())
        own = {name: (folder / name).read_bytes() for name in (_CERTIFICATE, _KEY)}
        shared = await secret.share(own)
        if shared != own:
            replace_file(folder / _CERTIFICATE, shared[_CERTIFICATE], 0o644)
            replace_file(folder / _KEY, shared[_KEY], 0o600)
    except (OSError, ValueError) as error:
        raise EngineError("identity", f"{folder}: {error}", "remove the folder: the Secret has its content") from error


class SharedRegister:
    """The register of API keys: one writer, which leads."""

    def __init__(self, secret: SharedSecret) -> None:
        self._secret = secret
        self._loop = asyncio.get_running_loop()

    async def load(self, folder: Path) -> None:
        """Puts the register into the file that `Keys` reads."""
        path = folder / REGISTER
        if content := (await self._secret.read()).get(REGISTER):
            replace_file(path, content, 0o600)
        else:
            path.unlink(missing_ok=True)

    def keep(self, content: bytes) -> None:
        """Called in a thread. OSError."""
        if len(content) > _MOST:
            raise OSError(f"more API keys than a Secret has room for ({_MOST} bytes): delete some")
        try:
            asyncio.run_coroutine_threadsafe(self._secret.write(REGISTER, content), self._loop).result(_PATIENCE)
        except (EngineError, TimeoutError) as error:
            raise OSError(str(error)) from error
