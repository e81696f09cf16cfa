from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from k8e.engine import Runtime
from tests.engine.driver import Driver, open_driver
from tests.engine.rig import Rig, Room, open_rig
from tests.runtimes import do_without


@pytest.fixture(scope="module", params=[Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """An engine for the module and each runtime that works here. Ends with a look at what it left behind."""
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")
    async with open_rig(request.param) as rig:
        if not rig.report.available:
            do_without(rig.runtime.value, rig.report.reason)
        yield rig


@pytest.fixture(scope="module")
async def driver(rig: Rig) -> AsyncIterator[Driver]:
    async with open_driver(rig) as driver:
        yield driver


@pytest.fixture(scope="module")
async def room(rig: Rig) -> AsyncIterator[Room]:
    """A sandbox that the module's tests share, for what cannot break it."""
    async with rig.room() as room:
        yield room
