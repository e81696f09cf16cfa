"""From the outcome that the agent reports to the record of the run. Pure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Final

from k8e.core.model import OUTPUT_LIMIT, Status
from k8e.core.store.records import RunRecord
from k8e.link.model import Cause, Outcome

TIMEOUT_CODE: Final = 124
SIGNAL_BASE: Final = 128
OOM_CODE: Final = SIGNAL_BASE + signal.SIGKILL


def record_outcome(
    record: RunRecord,
    outcome: Outcome,
    *,
    oom: bool = False,
    stdout: int = OUTPUT_LIMIT,
    stderr: int = OUTPUT_LIMIT,
) -> RunRecord:
    """`oom` is what `suspect_oom` found; `stdout` and `stderr` are how many bytes of each stream are kept at most."""
    status, code = judge(outcome.exit_code, outcome.signal, outcome.cause, oom=oom)
    return replace(
        record,
        status=status,
        exit_code=code,
        stdout_bytes=outcome.stdout_bytes,
        stderr_bytes=outcome.stderr_bytes,
        truncated=outcome.stdout_bytes > stdout or outcome.stderr_bytes > stderr,
        duration_ms=round(outcome.wall_seconds * 1000),
    )


def judge(exit_code: int | None, number: int | None, cause: Cause | None, *, oom: bool) -> tuple[Status, int | None]:
    """Status and exit code. `number` is the signal that the command died of.

    A time limit comes first, whatever else happened on the way out. Killed: by an order of the caller, or by a signal.
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
    """Whether the kernel's out-of-memory kills, counted during a run, explain how it ended.

    The count is the sandbox's, not the command's. So it explains a SIGKILL (a shell says 137), and any failure of a
    command that ran alone. Of two commands at once, one that failed for its own reasons must not be blamed on memory.
    """
    if kills <= 0:
        return False
    if number == signal.SIGKILL or exit_code == OOM_CODE:
        return True
    return alone and exit_code != 0
