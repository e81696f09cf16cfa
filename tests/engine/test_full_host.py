"""The host's own disk is full below the state directory: an EngineError that says so, nothing left, and all is well as
soon as there is room again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from tests.engine.rig import LIMITS, Rig, find_report, open_engine, place_for_engine
from tests.engine.traces import wait_for_no_traces

KIB, MIB = 1 << 10, 1 << 20
DISK = 64 * MIB


@contextlib.contextmanager
def small_state(size: int) -> Iterator[tuple[Path, Path]]:
    with place_for_engine() as (state, run):
        state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "tmpfs", state], check=True)
        try:
            yield state, run
        finally:
            subprocess.run(["umount", state], check=True)


async def resize(state: Path, size: int) -> None:
    process = await asyncio.create_subprocess_exec("mount", "-o", f"remount,size={size}", state)
    assert await process.wait() == 0


@contextlib.asynccontextmanager
async def engine_in(size: int) -> AsyncIterator[LocalEngine]:
    with small_state(size) as (state, run):
        async with open_engine(state, run) as engine:
            yield engine
        await wait_for_no_traces(engine.layout)


def spec_for(runtime: Runtime) -> SandboxSpec:
    return SandboxSpec(runtime, limits=replace(LIMITS, disk=DISK))


@pytest.mark.parametrize("size", [16 * KIB, 128 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB])
async def test_a_full_state_directory_is_an_engine_error(rig: Rig, size: int) -> None:
    async with engine_in(size) as engine:
        with pytest.raises(EngineError):
            await engine.create("full", spec_for(rig.runtime))
        assert await engine.list() == []
        await wait_for_no_traces(engine.layout)


async def test_an_engine_recovers_when_there_is_room_again(rig: Rig) -> None:
    """Full after the probe, at every amount of room that is left, and then not any more: the same engine goes on."""
    async with engine_in(256 * MIB) as engine:
        assert (await find_report(engine, rig.runtime)).available
        await engine.create("first", spec_for(rig.runtime))
        await engine.destroy("first")
        used = await asyncio.to_thread(used_bytes, engine.layout.state)
        for spare in (0, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, 512 * KIB):
            await resize(engine.layout.state, used + spare)
            with pytest.raises(EngineError):
                await engine.create("second", spec_for(rig.runtime))
            assert await engine.list() == []
            await wait_for_no_traces(engine.layout)
        await resize(engine.layout.state, 256 * MIB)
        await engine.create("third", spec_for(rig.runtime))
        sandbox, _ = await engine.attach("third")
        assert await sandbox.list_dir(b"/workspace") == []


async def test_a_sandbox_that_meets_the_hosts_end_can_be_destroyed(rig: Rig) -> None:
    """The host promised more than it has: writing fails inside, and taking the sandbox down does not."""
    async with engine_in(256 * MIB) as engine:
        await engine.create("greedy", spec_for(rig.runtime))
        used = await asyncio.to_thread(used_bytes, engine.layout.state)
        await resize(engine.layout.state, used + 4 * MIB)
        inner = Rig(rig.runtime, engine, rig.report)
        room = await inner.enter("greedy")
        done = await inner.unless_dead("greedy", room.python(WRITE))
        if rig.native:  # gVisor keeps the news to itself
            assert done is not None
            assert b"OSError" in done.stderr
        await engine.destroy("greedy")
        assert await engine.list() == []


WRITE = """
import os
with open("fill", "wb") as file:
    for _ in range(40):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file)
"""


def used_bytes(state: Path) -> int:
    output = subprocess.run(["df", "--output=used", "-B1", state], check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])
