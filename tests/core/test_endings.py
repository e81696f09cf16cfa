from __future__ import annotations

import pytest

from k8e.core.model import Status
from k8e.core.runs.endings import judge, record_outcome, suspect_oom
from k8e.core.store.records import RunRecord
from k8e.link.model import Cause, Outcome


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause", "oom", "verdict"),
    [
        (0, None, Cause.ITSELF, False, (Status.COMPLETED, 0)),
        (7, None, Cause.ITSELF, False, (Status.COMPLETED, 7)),
        (None, 11, Cause.ITSELF, False, (Status.KILLED, 139)),
        (None, 15, Cause.ENDED, False, (Status.KILLED, 143)),
        (0, None, Cause.ENDED, False, (Status.KILLED, 0)),
        (None, 15, Cause.TIMEOUT, False, (Status.TIMED_OUT, 124)),
        (0, None, Cause.TIMEOUT, False, (Status.TIMED_OUT, 124)),
        (None, 9, Cause.TIMEOUT, True, (Status.TIMED_OUT, 124)),
        (None, 9, Cause.ITSELF, True, (Status.OOM_KILLED, 137)),
        (1, None, Cause.ITSELF, True, (Status.OOM_KILLED, 1)),
        (None, None, None, False, (Status.LOST, None)),
    ],
)
def test_how_it_ended_in_words(
    exit_code: int | None, signal: int | None, cause: Cause | None, oom: bool, verdict: tuple[Status, int | None]
) -> None:
    assert judge(exit_code, signal, cause, oom=oom) == verdict


@pytest.mark.parametrize(
    ("exit_code", "signal", "kills", "alone", "suspected"),
    [
        (None, 9, 0, True, False),
        (None, 9, 1, False, True),
        (137, None, 1, False, True),
        (1, None, 1, True, True),
        (1, None, 1, False, False),
        (0, None, 1, True, False),
        (None, 15, 1, False, False),
    ],
)
def test_memory_is_blamed_only_where_it_explains_the_end(
    exit_code: int | None, signal: int | None, kills: int, alone: bool, suspected: bool
) -> None:
    assert suspect_oom(exit_code, signal, kills=kills, alone=alone) == suspected


@pytest.mark.parametrize(("stdout", "stderr", "truncated"), [(3, 0, False), (2, 0, True), (0, 0, True)])
def test_a_record_has_all_that_the_outcome_says(stdout: int, stderr: int, truncated: bool) -> None:
    outcome = Outcome(7, None, Cause.ITSELF, 3, 0, 0.25, 0.0, 0.0, 0)
    ended = record_outcome(RunRecord("run-1", "a", False, 1.0), outcome, stdout=stdout, stderr=stderr)
    assert (ended.status, ended.exit_code, ended.duration_ms) == (Status.COMPLETED, 7, 250)
    assert (ended.stdout_bytes, ended.stderr_bytes, ended.truncated) == (3, 0, truncated)
