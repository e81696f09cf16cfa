"""The test daemon with a short patience for itself, and with signals that make its loop hang in earnest:
`python -m tests.cli.stuck_launcher READY_FD MARGIN`."""

from __future__ import annotations

import functools
import re
import signal
import sys
import time

from k8e.daemon import server, watchdog
from tests.cli.launcher import make_bare_engine

HANG, SHORTLY, HOLD = signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH


def hang_for_good(number: int, frame: object) -> None:
    time.sleep(1000)


def hang_shortly(number: int, frame: object) -> None:
    time.sleep(3)


def hold_the_interpreter(number: int, frame: object) -> None:
    """A regular expression that takes for ever, during which no other thread runs."""
    re.match(r"(a+)+$", "a" * 64 + "b")


if __name__ == "__main__":
    signal.signal(HANG, hang_for_good)
    signal.signal(SHORTLY, hang_shortly)
    signal.signal(HOLD, hold_the_interpreter)
    watchdog.MARGIN = float(sys.argv[2])  # type: ignore[misc]
    server.Watchdog = functools.partial(watchdog.Watchdog, said=1.5, ended=5.0)  # type: ignore[attr-defined,assignment]
    sys.exit(server.run_detached(int(sys.argv[1]), make_bare_engine))
