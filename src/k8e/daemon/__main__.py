"""Runs the daemon detached; the command line starts it this way."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from k8e.daemon.server import run_detached


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "--ready-fd":
        sys.stderr.write("k8e.daemon is started by k8e; `k8e server` is for people\n")
        return 1
    return run_detached(int(arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
