"""A kind of sandbox that cannot be made is tried again later and later."""

from __future__ import annotations

from k8e.core.pool.demand import FIRST_RETRY, LAST_RETRY, Retries, Template
from k8e.engine import Runtime

KIND, OTHER = Template(Runtime.NATIVE), Template(Runtime.GVISOR)


def test_each_failure_doubles_the_delay_up_to_the_last() -> None:
    retries = Retries()
    delays = [retries.fail(KIND, "no disk", 0.0) for _ in range(8)]
    assert delays == [min(FIRST_RETRY * 2**number, LAST_RETRY) for number in range(8)]
    assert (retries.may_try(KIND, LAST_RETRY - 0.1), retries.may_try(KIND, LAST_RETRY)) == (False, True)
    assert (retries.may_try(OTHER, 0.0), retries.cause(KIND), retries.cause(OTHER)) == (True, "no disk", "")


def test_a_kind_that_can_be_made_or_is_not_wanted_begins_anew() -> None:
    retries = Retries()
    for kind in (KIND, OTHER):
        retries.fail(kind, "no disk", 0.0)
    retries.forget(KIND)
    retries.keep({KIND})
    assert retries.may_try(KIND, 0.0)
    assert retries.fail(OTHER, "again", 0.0) == FIRST_RETRY
