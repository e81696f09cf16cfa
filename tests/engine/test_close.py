"""An engine that is told to stop in the middle of something: it does not wait for the end, and leaves nothing there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from k8e.engine import EngineError, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from tests.engine.rig import LIMITS, Rig, eventually, find_report, place_for_engine
from tests.engine.traces import cgroup_parents, list_table, mount_points, wait_for_no_traces
from tests.sandboxes import needs_root

pytestmark = needs_root


def has_table(engine: LocalEngine) -> bool:
    return list_table(engine.layout) is not None


def has_mount(engine: LocalEngine) -> bool:
    return any(point.startswith(f"{engine.layout.state}/") for point in mount_points())


def has_cgroup(engine: LocalEngine) -> bool:
    return bool(cgroup_parents(engine.layout))


def has_probes(engine: LocalEngine) -> bool:
    return bool(engine._probes._reports.tasks)


@pytest.mark.parametrize("moment", [has_probes, has_table, has_mount, has_cgroup])
async def test_closed_while_it_finds_out_what_works(moment: Callable[[LocalEngine], bool]) -> None:
    with place_for_engine() as (state, run):
        engine = LocalEngine(state, run)
        probing = asyncio.create_task(engine.probe())
        while not moment(engine):
            await asyncio.sleep(0)
        await engine.close()
        (result,) = await asyncio.gather(probing, return_exceptions=True)
        # The caller is told that it was called off.
        assert isinstance(result, (asyncio.CancelledError, EngineError)), result
        await wait_for_no_traces(engine.layout)
        assert list_table(engine.layout) is None
        # And it can be asked again.
        assert any(report.available for report in await engine.probe())
        await engine.close()
        await wait_for_no_traces(engine.layout)
        assert list_table(engine.layout) is None


async def test_closed_while_it_removes_what_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with place_for_engine() as (state, run):
        engine = LocalEngine(state, run)
        destroy, begun, closing = engine.destroy, asyncio.Event(), asyncio.Event()

        async def wait_and_destroy(sandbox: str) -> None:
            begun.set()
            await closing.wait()
            await destroy(sandbox)

        monkeypatch.setattr(engine, "destroy", wait_and_destroy)
        probing = asyncio.create_task(find_report(engine, Runtime.NATIVE))
        await begun.wait()
        (work,) = engine._probes._reports.tasks.values()
        closed = asyncio.create_task(engine.close())
        while not work.cancelling():
            await asyncio.sleep(0)
        closing.set()
        await closed
        await asyncio.gather(probing, return_exceptions=True)
        await wait_for_no_traces(engine.layout)
        assert list_table(engine.layout) is None


async def test_closed_while_it_creates() -> None:
    """A half-made sandbox is removed; what was made lives on, with its rules."""
    with place_for_engine() as (state, run):
        engine = LocalEngine(state, run)
        reports = await engine.probe()
        runtime = next(each.runtime for each in reports if each.available and each.runtime is not Runtime.KATA)
        spec = SandboxSpec(runtime, limits=LIMITS)
        await engine.create("made", spec)
        creating = asyncio.create_task(engine.create("half", spec))

        async def has_begun() -> bool:
            return "half" in await engine.list()

        await eventually(has_begun, "it is being created")
        await engine.close()
        (result,) = await asyncio.gather(creating, return_exceptions=True)
        assert isinstance(result, EngineError), result
        assert await engine.list() == ["made"]
        assert list_table(engine.layout) is not None
        successor = LocalEngine(state, run)
        sandbox, _ = await successor.attach("made")
        assert await sandbox.commands() == []
        await successor.destroy("made")
        await successor.close()
        await wait_for_no_traces(engine.layout)
        assert list_table(engine.layout) is None


async def test_destroying_a_silent_one_waits_for_no_caller_who_waits_for_it(rig: Rig) -> None:
    """Each of them would dial its agent, one after the other, and wait for an answer."""
    async with rig.room() as room:
        await rig.engine._links._open.pop(room.name).close()
        for pid in rig.host_processes(room.name):
            os.kill(pid, signal.SIGSTOP)
        callers = [asyncio.create_task(rig.engine.attach(room.name)) for _ in range(5)]
        await eventually(lambda: _is_dialled(rig, room.name), "one of them dials")
        async with asyncio.timeout(15):  # a dial takes ten seconds
            await rig.engine.destroy(room.name)
        assert all(isinstance(each, EngineError) for each in await asyncio.gather(*callers, return_exceptions=True))


async def _is_dialled(rig: Rig, name: str) -> bool:
    return name in rig.engine._links._dialling
