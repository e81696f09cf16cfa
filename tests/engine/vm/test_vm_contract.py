"""The contract of engines, with virtual machines. They have no directories of the machine: those are refused
(test_machines.py)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine.conformance import CHECKS, Check, Subject, run_check
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.runtime import VmOptions
from tests.engine.rig import Rig
from tests.engine.test_contract import open_subject
from tests.engine.vm.conftest import VM_LIMITS, choose_few, open_vm_driver
from tests.shares import current_share

REFUSED = {"a_shared_workspace_is_live_in_both_directions"}  # with the reason: test_machines.py
WANTED = [check for check in CHECKS if "mounts" not in check.needs and check.name not in REFUSED]
# Dozens of boots each: in a soak. test_vm_crashes.py has a share of the same every day.
LONG = [check for check in WANTED if "crash" in check.needs]
PATIENCE = 5  # times as long as elsewhere


@pytest.fixture(scope="module")
async def subject(rig: Rig, virtual: VmOptions, guest: Path) -> AsyncIterator[Subject]:
    layout = rig.engine.layout

    def again() -> LocalEngine:
        return LocalEngine(layout.state, layout.run, virtual=virtual)

    async with contextlib.AsyncExitStack() as stack:
        # It boots machines of its own.
        driver = await stack.enter_async_context(open_vm_driver(rig, guest)) if current_share().parts == 1 else None
        subject = await stack.enter_async_context(open_subject(rig, driver, rig.spec(VM_LIMITS), again))
        yield replace(subject, directory=None)


@pytest.mark.parametrize("check", choose_few(WANTED, rounds=4, without=LONG), ids=lambda check: check.name)
async def test_contract(subject: Subject, check: Check) -> None:
    assert check.needs <= subject.provides
    await run_check(replace(check, deadline=check.deadline * PATIENCE), subject)
