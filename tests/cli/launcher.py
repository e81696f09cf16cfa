"""The daemon as the command line starts it, but for its engine: `python -m tests.cli.launcher READY_FD`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from k8e.daemon.paths import Paths
from k8e.daemon.server import run_detached
from k8e.engine import Engine, Runtime, RuntimeReport, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.launcher import refuse_shape
from k8e.engine.local.vm.runtime import VmOptions
from k8e.settings import Settings
from tests.core.bare_engine import BareEngine


class Machines(BareEngine):
    """Calls itself kata and refuses what virtual machines refuse."""

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        refuse_shape(spec)
        await super().create(sandbox, spec)


def make_bare_engine(paths: Paths, settings: Settings) -> BareEngine:
    engine = BareEngine(paths.state_dir / "bare")
    if os.environ.get("K8E_TEST_MACHINES"):
        engine = Machines(paths.state_dir / "bare")
        engine.reports = [RuntimeReport(Runtime.KATA, available=True, version="none", emulated=True)]
    if os.environ.get("K8E_TEST_EMULATED"):
        engine.reports = [replace(report, emulated=report.available) for report in engine.reports]
    return engine


def make_engine(paths: Paths, settings: Settings) -> Engine:
    """The real one, where a test wants virtual machines: the guest is the tests' own."""
    if guest := os.environ.get("K8E_TEST_GUEST"):
        virtual = VmOptions(Path(guest), emulation=settings.runtimes_kata.emulation)
        return LocalEngine(paths.state_dir, paths.run_dir, virtual=virtual)
    return make_bare_engine(paths, settings)


if __name__ == "__main__":
    sys.exit(run_detached(int(sys.argv[1]), make_engine))
