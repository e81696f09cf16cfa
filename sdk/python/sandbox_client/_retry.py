"""How often a call is sent again that was never sent, or that only asks: nothing else is ever sent twice."""

from __future__ import annotations

import time
from typing import Final

from sandbox_client._errors import CONNECTION_LOST, UNREACHABLE, SandboxError, Unavailable

PATIENCE: Final = 15.0  # seconds in which another gateway takes the place of one that is gone
_FIRST, _MOST = 0.05, 1.0  # seconds between two attempts


def is_lost(failure: SandboxError) -> bool:
    """Whether the connection failed and the call may be sent again: `Unavailable` was never sent, or only asks."""
    return isinstance(failure, Unavailable) and failure.code in (UNREACHABLE, CONNECTION_LOST)


class Retry:
    """One call. At this machine's daemon, which is started, it is sent once more; at a gateway that has answered this
    client before, until PATIENCE is over. An address that never answered is more likely wrong than away."""

    def __init__(self) -> None:
        self._until = 0.0
        self._pause = _FIRST
        self._again = False

    def choose_pause(self, *, local: bool, known: bool) -> float | None:
        """Seconds until the next attempt; None: there is none."""
        if local:
            first, self._again = not self._again, True
            return 0.0 if first else None
        if not known:
            return None
        now = time.monotonic()
        self._until = self._until or now + PATIENCE
        pause, self._pause = self._pause, min(self._pause * 2, _MOST)
        return pause if now + pause < self._until else None
