"""The daemon of a machine that has no runsc: `python -m tests.scenarios.launcher READY_FD`. All else is the product."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from k8e.daemon.server import run_detached
from k8e.engine import Runtime
from k8e.engine.local import engine
from k8e.engine.local.runtime.runtime import OciRuntime, find_runtimes


async def find_all_but_gvisor(runtime: Runtime) -> Sequence[OciRuntime]:
    return [] if runtime is Runtime.GVISOR else await find_runtimes(runtime)


if __name__ == "__main__":
    engine.find_runtimes = find_all_but_gvisor  # type: ignore[attr-defined]
    sys.exit(run_detached(int(sys.argv[1])))
