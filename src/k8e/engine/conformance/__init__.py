"""Checks that every engine runs against itself: beside `k8e.conformance`, which is about one sandbox, these are about
the engine that makes them.

    for check in CHECKS:
        if check.needs <= subject.provides:
            await run_check(check, subject)

A check is a plain async function that takes a `Subject` and raises AssertionError. It knows nothing but the contract of
`k8e.engine.Engine`, and what the harness can do where that says nothing: kill a sandbox or a daemon, look at the rules
of the machine, have something refused. It destroys every sandbox that it makes.
"""

from k8e.engine.conformance import crashes, life, network, restart, shares
from k8e.engine.conformance.subject import CHECKS, Check, Subject, run_check

__all__ = ["CHECKS", "Check", "Subject", "run_check"]

# Importing the modules is what fills the registry.
_ = (crashes, life, network, restart, shares)
