"""The conformance suite: checks that every way into a sandbox runs against itself.

    for check in CHECKS:
        if check.needs <= subject.provides:
            await run_check(check, subject)

A check is a plain async function that takes a `Subject` and raises AssertionError, with what it expected and
what it got. It knows nothing but the `Sandbox` contract. Inside the sandbox it counts on a shell, coreutils and
python3, all found in `subject.path`; it leaves behind no process, and no file outside `subject.directory`.
"""

import importlib
import pkgutil

from k8e.conformance import commands, files
from k8e.conformance.registry import CHECKS, Check, run_check
from k8e.conformance.subject import LinkControl, Subject

__all__ = ["CHECKS", "Check", "LinkControl", "Subject", "run_check"]

for _room in (commands, files):  # importing a module puts its checks into the registry
    for _module in pkgutil.iter_modules(_room.__path__, f"{_room.__name__}."):
        importlib.import_module(_module.name)
