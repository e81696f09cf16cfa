"""The daemon as the command line starts it, but for its engine: `python -m tests.cli.launcher READY_FD`."""

from __future__ import annotations

import sys

from k8e.daemon.paths import Paths
from k8e.daemon.server import run_detached
from k8e.settings import Settings
from tests.core.bare_engine import BareEngine


def make_bare_engine(paths: Paths, settings: Settings) -> BareEngine:
    return BareEngine(paths.state_dir / "bare")


if __name__ == "__main__":
    sys.exit(run_detached(int(sys.argv[1]), make_bare_engine))
