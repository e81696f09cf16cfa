"""How long a run may take to start and to end, and how long its caller waits for the sandbox to say so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

from k8e.core.errors import Fault, Kind
from k8e.core.sessions.ends import SILENCE
from k8e.core.tasks import wait_first

GRACE: Final = 2.0  # between TERM and KILL
# The caller has its answer within the timeout and a second. So a command that timed out has less grace, and what the
# sandbox has not said by then is not waited for.
TIMEOUT_GRACE: Final = 0.4
ALLOWANCE: Final = 0.75
LOOK: Final = 0.05


async def wait_until(futures: Collection[asyncio.Future[Any]], due: float) -> None:
    """Returns when one of them is done, or a moment after `due`, in the loop's time. The moment is longer when the
    daemon itself comes late: what arrived while it stood still is read before the run is judged."""
    loop = asyncio.get_running_loop()
    await wait_first(*futures, timeout=due - loop.time())
    if not any(future.done() for future in futures):
        await wait_first(*futures, timeout=max(LOOK, min(loop.time() - due, ALLOWANCE)))


def describe_silence(subject: str) -> Fault:
    hint = f"It may or may not have happened. A sandbox that stays silent for {SILENCE:g} s is ended."
    return Fault(Kind.LOST, "sandbox_unreachable", f"{subject}: the sandbox did not answer in time", hint=hint)
