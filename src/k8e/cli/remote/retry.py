"""Sends a call again that was never sent, or that only asks, while one gateway takes the place of another. Nothing else
is ever sent twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from k8e.cli.process import Failure, ServiceError

T = TypeVar("T")

PATIENCE: Final = 15.0  # seconds from the first attempt on, in which another gateway takes the place of a lost one
_FIRST, _MOST = 0.05, 1.0  # seconds between two attempts


def repeat(attempt: Callable[[], T], *, known: bool) -> T:
    """Makes attempts until one is answered. `known`: this gateway has answered this user before; an address that has
    never answered is more likely wrong than away, and is an error at once."""
    until = time.monotonic() + PATIENCE
    pause = _FIRST
    while True:
        try:
            return attempt()
        except Failure as failure:
            # A gateway that hangs has used up the time; one that refused the call has answered it.
            lost = failure.code == "unreachable" and not isinstance(failure, ServiceError)
            if not known or not lost or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _MOST)
