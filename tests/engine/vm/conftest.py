from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from k8e.engine import Runtime
from k8e.engine.local import LocalEngine
from k8e.engine.local.vm.runtime import QEMU, VmOptions
from tests.engine.answers import plant_answers
from tests.engine.driver import Driver, open_driver
from tests.engine.rig import LIMITS, Rig, Room, find_report, place_for_engine
from tests.engine.traces import list_table, wait_for_no_traces
from tests.engine.vm.guests import find_guest, find_version
from tests.shares import ROUND, current_share, today

VM_LIMITS = replace(LIMITS, cpus=1.0, memory=256 << 20)
T = TypeVar("T")


def choose_few(items: Sequence[T], rounds: int, without: Sequence[T] = ()) -> list[T]:
    """Of a list whose items each cost an emulated machine seconds: a run takes a part of its day's share, so that it
    takes so many rounds until all were taken, but those `without`. A soak has everything."""
    share = current_share()
    if share.parts == 1:
        return list(items)
    usual = [item for item in items if item not in without]
    return [item for number, item in enumerate(usual) if (number - find_turn()) % (share.parts * rounds) == 0]


def find_turn() -> int:
    """Another number each day, for as long as anything here takes turns."""
    share = current_share()
    return share.part + share.parts * (today() // ROUND)


def on_its_day(number: int) -> pytest.MarkDecorator:
    """Tests that boot many machines: one of three such files each day. A soak has all."""
    mine = current_share().parts == 1 or find_turn() % 3 == number
    return pytest.mark.skipif(not mine, reason="another day's: emulated machines take their time")


@pytest.fixture(scope="session")
def guest() -> Path:
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")
    for tool in (QEMU, "mkfs.erofs", "apt-get"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not find_version():
        pytest.skip("apt knows no kernel for virtual machines")
    return asyncio.run(find_guest())


@pytest.fixture(scope="session")
def virtual(guest: Path) -> VmOptions:
    """KVM is not tried: where it does not work it takes its time to say so."""
    return VmOptions(guest, emulation=True, kvm=Path("/nonexistent"))


@pytest.fixture(scope="module")
async def rig(virtual: VmOptions) -> AsyncIterator[Rig]:
    with place_for_engine() as (state, run):
        plant_answers(state)
        engine = LocalEngine(state, run, virtual=virtual)
        try:
            rig = Rig(Runtime.KATA, engine, await find_report(engine, Runtime.KATA))
            assert rig.report.available, rig.report
            yield rig
        finally:
            for name in await engine.list():
                await engine.destroy(name)
            await engine.close()
        await wait_for_no_traces(engine.layout, rig.names)
        assert list_table(engine.layout) is None, "the last one out removes the rules"


@pytest.fixture(scope="module")
async def room(rig: Rig) -> AsyncIterator[Room]:
    async with rig.room(VM_LIMITS) as room:
        yield room


@contextlib.asynccontextmanager
async def open_vm_driver(rig: Rig, guest: Path) -> AsyncIterator[Driver]:
    """Another daemon, which dies where it is told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K8E_TEST_GUEST", str(guest))
        async with open_driver(rig) as driver:
            yield driver


@pytest.fixture(scope="module")
async def driver(rig: Rig, guest: Path) -> AsyncIterator[Driver]:
    async with open_vm_driver(rig, guest) as driver:
        yield driver
