"""What every engine of ours must do, as checks that any of them can run against itself: beside `k8e.conformance`, which
is about one sandbox, this is about who makes them.

    for check in CHECKS:
        if check.needs <= subject.provides:
            await run_check(check, subject)

A check is a plain async function that takes a `Subject` and raises AssertionError. It knows nothing but the contract of
`k8e.engine.Engine`, and what the harness can do where that says nothing: kill a sandbox, look at the rules of the
machine, have something refused. It destroys every sandbox that it makes.
"""

from k8e.engine.conformance import life, network, restart, shares
from k8e.engine.conformance.subject import CHECKS, Check, Subject, run_check

__all__ = ["CHECKS", "Check", "Subject", "run_check"]

# Importing the modules is what fills the registry.
_ = (life, network, restart, shares)
