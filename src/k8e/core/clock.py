"""The two clocks. Deadlines are counted on one that never jumps, records carry the one that people read.

Linux's monotonic clock is the same for every process of one boot and stands still while the machine sleeps. So the time
of last use outlives the daemon, and neither a corrected wall clock nor a laptop's lid ends a session.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    @property
    def boot(self) -> str:
        """Names the stretch of time within which `monotonic` can be compared."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def __init__(self) -> None:
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
