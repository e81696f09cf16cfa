"""A daemon that is killed while it makes sandboxes ahead: `python -m tests.engine.doomed_pool STATE RUN RUNTIME`.

It says on stdout which sandbox it is about to make, one line each, and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from k8e.core.model import Caller, SessionSpec
from k8e.core.service import Service
from k8e.core.store.store import Store
from k8e.engine import Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.settings import PoolSettings
from tests.engine.rig import LIMITS


class TellingEngine(LocalEngine):
    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        os.write(1, f"{sandbox}\n".encode())
        await super().create(sandbox, spec)


async def main(state: Path, run: Path, runtime: Runtime) -> None:
    store = await Store.open(state / "k8e.db")
    service = Service(TellingEngine(state, run), store, pool=PoolSettings(min=1000, max=1000))
    await service.recover()
    spec = SessionSpec(runtime=runtime, limits=LIMITS, allowed_hosts=[])
    for _ in range(2):  # a kind that is not the usual one is made ahead when it was asked for twice
        await service.sessions.create(Caller(0), spec)
    await service._pool.settle()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Runtime(sys.argv[3])))
