"""A sandbox's life through the engine's contract: made, used, found again, ended."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace

import pytest

from k8e.engine import EngineError, Observation, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.policy import HostList
from tests.engine.rig import Rig, Room, open_engine, place_for_engine
from tests.engine.traces import find_traces, wait_for_no_traces


async def test_probe_knows_every_runtime_the_strongest_first(rig: Rig) -> None:
    reports = await rig.engine.probe()
    assert [report.runtime for report in reports] == [Runtime.GVISOR, Runtime.NATIVE, Runtime.KATA, Runtime.FIRECRACKER]
    for report in reports:
        assert report.available != bool(report.reason)
        assert report.available or report.hint


@pytest.mark.parametrize("runtime", [Runtime.KATA, Runtime.FIRECRACKER])
async def test_a_runtime_that_is_not_there_is_refused_with_a_hint(rig: Rig, runtime: Runtime) -> None:
    name = rig.new_name()
    with pytest.raises(EngineError) as raised:
        await rig.engine.create(name, SandboxSpec(runtime))
    assert runtime.value in raised.value.control
    assert raised.value.hint
    assert name not in await rig.engine.list()


async def test_an_image_that_is_not_there_is_refused(rig: Rig) -> None:
    name = rig.new_name()
    with pytest.raises(EngineError, match="image"):
        await rig.engine.create(name, SandboxSpec(rig.runtime, image="debian:12"))
    assert name not in await rig.engine.list()


async def test_the_toolchain_works_for_the_default_user(room: Room) -> None:
    assert await room.output("bash", "-c", "id -un; pwd; echo $HOME") == "user\n/workspace\n/home/user\n"
    assert await room.output("python3", "-c", "print(6 * 7)") == "42\n"
    assert "pip" in await room.output("bash", "-c", "command -v pip")


async def test_attach_gives_everybody_the_same_link(rig: Rig, room: Room) -> None:
    links = await asyncio.gather(*(rig.engine.attach(room.name) for _ in range(5)))
    assert {id(link) for link, _ in links} == {id(room.link)}


async def test_a_sandbox_that_never_was(rig: Rig) -> None:
    name = rig.new_name()
    with pytest.raises(EngineError):
        await rig.engine.attach(name)
    assert await rig.engine.observe(name) == Observation(alive=False, oom_kills=0)
    await rig.engine.destroy(name)


async def test_a_sandbox_lives_whatever_its_network_is_like(
    rig: Rig, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a firewall that is being reloaded must not keep a daemon from starting."""

    async def fail(_: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(rig.engine, "_resume_network", fail)
    seen = await rig.engine.observe(room.name)
    assert (seen.alive, seen.refusals_unknown) == (True, "[Errno 28] no space left on device")


async def test_a_name_can_be_used_again_and_again(rig: Rig) -> None:
    # runsc has four places for its control socket; the fifth time something that it left would show.
    name = rig.new_name()
    for _ in range(6):
        await rig.engine.create(name, rig.spec())
        room = await rig.enter(name)
        assert await room.output("ls", "-A", "/workspace") == ""
        await room.output("touch", "/workspace/mine")
        await rig.engine.destroy(name)


async def test_destroyed_sandboxes_leave_nothing(rig: Rig, room: Room) -> None:
    before = set(await rig.engine.list())
    async with rig.room() as other:
        process = await other.link.start(other.spec("sleep", "infinity"))
        assert set(await rig.engine.list()) == before | {other.name}
    process.discard()
    assert set(await rig.engine.list()) == before
    assert not rig.cgroups(other.name)
    assert not other.paths.top.exists()


async def test_the_next_engine_finds_sandboxes_and_their_commands(rig: Rig) -> None:
    async with rig.room() as room:
        spec = room.spec("bash", "-c", "echo begun; cat; echo done", stdin=True, detached=True)
        process = await room.link.start(spec)
        await rig.engine.close()
        successor = LocalEngine(rig.engine.layout.state, rig.engine.layout.run)
        try:
            assert room.name in await successor.list()
            assert (await successor.observe(room.name)).alive
            found, place = await successor.attach(room.name)
            assert place == room.place
            (info,) = [info for info in await found.commands() if info.id == process.id]
            assert info.running
            again = await found.attach(process.id)
            await again.write(b"to the end\n")
            await again.close_stdin()
            output = b""
            while chunk := await again.stdout.read():
                output += chunk
            again.discard()
            assert output == b"begun\nto the end\ndone\n"
            assert (await again.wait()).exit_code == 0
        finally:
            await successor.close()


async def test_two_creates_of_one_name_have_one_winner(rig: Rig) -> None:
    name = rig.new_name()
    results = await asyncio.gather(*(rig.engine.create(name, rig.spec()) for _ in range(4)), return_exceptions=True)
    losers = [result for result in results if result is not None]
    assert len(losers) == 3
    assert all(isinstance(loser, EngineError) for loser in losers), losers
    room = await rig.enter(name)
    assert await room.output("echo", "alive") == "alive\n"
    await rig.engine.destroy(name)


async def test_destroy_twice_and_at_once(rig: Rig) -> None:
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    await asyncio.gather(*(rig.engine.destroy(name) for _ in range(3)))
    await rig.engine.destroy(name)
    assert name not in await rig.engine.list()


async def test_ids_of_sandboxes_never_overlap(rig: Rig) -> None:
    """Each native sandbox's root has another id on the host, so that one that got out meets no files of another."""
    async with rig.room() as first, rig.room() as second:
        maps = [await room.output("cat", "/proc/self/uid_map") for room in (first, second)]
        if rig.native:
            assert maps[0] != maps[1]
            assert all(int(line.split()[1]) >= 0x30000000 for line in maps)


async def test_nothing_is_left_after_a_module(rig: Rig) -> None:
    """That the module's last check can see: a sandbox counts as several kinds of traces while it lives."""
    name = rig.new_name()
    await rig.engine.create(name, replace(rig.spec(), egress=HostList.parse(["192.0.2.1"])))
    kinds = {trace.kind for trace in await asyncio.to_thread(find_traces, rig.engine.layout, rig.names)}
    assert kinds >= {"process", "cgroup", "loop device", "directory", "mount", "lease", "set element", "interface"}
    await rig.engine.destroy(name)


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_any_umask_makes_the_same_sandbox(rig: Rig, umask: int) -> None:
    """A daemon's umask is whatever its starter had: what a sandbox may enter must not depend on it. Ours is 022."""
    with place_for_engine() as (state, run):
        previous = os.umask(umask)
        try:
            async with open_engine(state, run) as engine:
                other = Rig(rig.runtime, engine, rig.report)
                async with other.room() as room:
                    assert await room.output("id", "-un") == "user\n"
                    modes = [
                        await room.output("stat", "-c", "%a", path) for path in ("/", "/workspace", "/tmp", "/etc")
                    ]
                    assert modes == ["755\n", "755\n", "1777\n", "755\n"]
                    assert os.stat(state).st_mode & 0o777 == 0o711
                    assert os.stat(run).st_mode & 0o777 == 0o711
        finally:
            os.umask(previous)
        await wait_for_no_traces(engine.layout)
