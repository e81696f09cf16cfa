"""What became of a command, in the words that users know. Pure."""

from __future__ import annotations

import signal
from typing import Final

from k8e.core.model import Status
from k8e.link.model import Cause

TIMEOUT_CODE: Final = 124
SIGNAL_BASE: Final = 128
OOM_CODE: Final = SIGNAL_BASE + signal.SIGKILL


def judge(exit_code: int | None, number: int | None, cause: Cause | None, *, oom: bool) -> tuple[Status, int | None]:
    """Status and exit code. `number` is the signal that the command died of, `oom` what `suspect_oom` found.

    Killed: on request or by a signal. A time limit comes first, whatever else happened on the way out.
    """
    code = SIGNAL_BASE + number if number is not None else exit_code
    if code is None:
        return Status.LOST, None
    if cause is Cause.TIMEOUT:
        return Status.TIMED_OUT, TIMEOUT_CODE
    if oom:
        return Status.OOM_KILLED, code
    if cause is Cause.ENDED or number is not None:
        return Status.KILLED, code
    return Status.COMPLETED, code


def suspect_oom(exit_code: int | None, number: int | None, *, kills: int, alone: bool) -> bool:
    """Whether the kernel's kills for want of memory, counted during a run, explain how it ended.

    The count is the sandbox's, not the command's. So it explains a SIGKILL (a shell says 137), and any failure of a
    command that ran alone: of two at once, the one that failed for its own reasons must not be told it was memory.
    """
    if kills <= 0:
        return False
    if number == signal.SIGKILL or exit_code == OOM_CODE:
        return True
    return alone and exit_code != 0
