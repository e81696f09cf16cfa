"""Another daemon, which dies where or when it is told to (doomed_driver.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.engine.rig import Rig


@dataclass(frozen=True, slots=True)
class Driver:
    rig: Rig
    process: asyncio.subprocess.Process

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the driver itself died"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def open_driver(rig: Rig) -> AsyncIterator[Driver]:
    layout = rig.engine.layout
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.engine.doomed_driver", layout.state, layout.run, rig.runtime.value),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    driver = Driver(rig, process)
    await driver.answer()
    yield driver
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
