"""Another daemon's stand-in engine, which tests kill: `python -m tests.core.doomed_engine FOLDER ACTION SANDBOX`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from k8e.engine import Runtime, SandboxSpec
from tests.core.bare_engine import BareEngine


async def main(folder: Path, action: str, sandbox: str) -> None:
    engine = BareEngine(folder)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    if action in ("create", "start"):
        await getattr(engine, action)(sandbox, SandboxSpec(Runtime.NATIVE))
    else:
        await getattr(engine, action)(sandbox)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
