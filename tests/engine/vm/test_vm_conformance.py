"""The conformance suite in an emulated virtual machine, as the default user in the workspace."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.conformance import CHECKS, Check
from k8e.link.dial import PortDialer
from tests.engine.rig import Rig
from tests.engine.test_conformance import LIMITS, Shared
from tests.engine.vm.conftest import choose_few
from tests.sandboxes import CuttableDialer

VM_LIMITS = replace(LIMITS, memory=768 << 20)
PATIENCE = 8.0  # times as long as elsewhere
# Its commands have eight seconds for what takes an emulated machine longer.
TOO_SLOW = {"timeout_reaches_every_kind_of_tree"}
WANTED = [check for check in CHECKS if check.name not in TOO_SLOW]
# Half a minute and more each: in a soak.
LONG_NAMES = {
    *("reader_that_stops_stops_the_command", "1000_commands_in_a_row", "many_background_children"),
    *("100_commands_at_once_with_much_output", "bulk_output_with_a_slow_reader_in_flat_memory"),
}
LONG = [check for check in WANTED if check.name in LONG_NAMES]


@pytest.fixture(scope="module")
async def shared(rig: Rig) -> AsyncIterator[Shared]:
    dialers: dict[Path, CuttableDialer] = {}

    def make_dialer(folder: str | os.PathLike[str], ports: Sequence[int], greeting: bytes) -> CuttableDialer:
        socket = Path(folder, "agent.sock")  # as that of other runtimes is called
        return dialers.setdefault(socket, CuttableDialer(PortDialer(folder, ports, greeting)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8e.engine.local.vm.machines.PortDialer", make_dialer)
        shared = Shared(rig, dialers, limits=VM_LIMITS, patience=PATIENCE)
        async with shared.stack:
            yield shared


@pytest.mark.parametrize("check", choose_few(WANTED, rounds=4, without=LONG), ids=lambda check: check.name)
async def test_conformance(shared: Shared, check: Check) -> None:
    await shared.run(check)
