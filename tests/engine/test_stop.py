"""Stopped and started: what was on the disk is there again, byte for byte, and nothing else of the sandbox was left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, Runtime
from k8e.engine.local.disk import fsck
from k8e.engine.local.disk.cleanup import empty_folder
from k8e.engine.local.record import IdRanges, Record
from k8e.engine.local.system.calls import opened, syncfs
from k8e.engine.local.system.tool import try_tool
from k8e.policy import HostList
from tests.engine.rig import ROOT, Rig, Room
from tests.engine.traces import find_traces

# Everything that a file can be: content with holes and odd names, modes, owners, links, times (those that were set:
# gVisor notes others by a clock of its own, microseconds apart from the disk's).
FILL = r"""
set -e
mkdir -p tree/deep/er "tree/$(printf 'odd\nname\377')"
printf 'a\0b\377' > tree/bytes
truncate -s 20M tree/sparse; printf end >> tree/sparse
head -c 5000000 /dev/urandom > tree/big
ln -s ../../../etc/passwd tree/deep/link; ln -s /nowhere tree/dangling; ln tree/big tree/hard
chmod 1751 tree/deep; chmod 0604 tree/bytes; touch -d @123456789.5 tree/bytes
echo kept > /tmp/temporary; echo home > ~/.profile-of-mine
"""
LOOK = r"""
find tree /tmp/temporary ~/.profile-of-mine -printf '%p %y %m %U %G %s %n %l\n' | sort | cat -v
stat -c %.9Y tree/bytes
find tree /tmp/temporary ~/.profile-of-mine -type f -print0 | sort -z | xargs -0 sha256sum | cat -v
"""


@contextlib.asynccontextmanager
async def lasting(rig: Rig) -> AsyncIterator[Room]:
    """A sandbox that is destroyed in whatever state it is then."""
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    try:
        yield await rig.enter(name)
    finally:
        await rig.engine.destroy(name)


def left_of(rig: Rig, name: str) -> list[str]:
    """Finds what there is of it on the machine, beside its directory."""
    traces = find_traces(rig.engine.layout, [name])
    return [f"{trace.kind} {trace.what}" for trace in traces if name in trace.what and trace.kind != "directory"]


async def stop(rig: Rig, room: Room) -> None:
    await rig.engine.stop(room.name)
    assert left_of(rig, room.name) == []
    assert sorted(os.listdir(room.paths.top)) == ["disk.img", "sandbox.json"]


async def start(rig: Rig, room: Room) -> Room:
    await rig.engine.start(room.name, rig.spec())
    return await rig.enter(room.name)


async def test_files_come_back_as_they_were(rig: Rig) -> None:
    async with lasting(rig) as room:
        await room.output("/bin/bash", "-c", FILL)
        await room.output("/bin/sh", "-c", "echo mine > /etc/of-root; chmod 640 /etc/of-root", identity=ROOT)
        before = await room.output("/bin/bash", "-c", LOOK)
        inside = await room.output("stat", "-c", "%U %G %a", "/etc/of-root", "/workspace", "/home/user")
        await stop(rig, room)
        assert not (await rig.engine.observe(room.name)).alive
        assert room.name in await rig.engine.list()
        with pytest.raises(EngineError, match="not running"):
            await rig.engine.attach(room.name)
        again = await start(rig, room)
        assert await again.output("/bin/bash", "-c", LOOK) == before
        assert await again.output("stat", "-c", "%U %G %a", "/etc/of-root", "/workspace", "/home/user") == inside
        assert await again.output("cat", "/etc/of-root", identity=ROOT) == "mine\n"
        assert await again.output("ls", "/dev/shm") == ""


async def test_what_runs_ends_and_does_not_come_back(rig: Rig) -> None:
    async with lasting(rig) as room:
        code = "trap '' TERM; (setsid sleep 1000 &); date > tick; echo started; while :; do date +%N > tick; done"
        process = await room.link.start(room.spec("/bin/bash", "-c", code))
        assert await process.stdout.read() == b"started\n"
        process.discard()
        await stop(rig, room)
        assert rig.host_processes(room.name) == set()
        again = await start(rig, room)
        first = await again.output("cat", "tick")
        assert await again.link.commands() == []
        assert await again.output("/bin/sh", "-c", "pgrep sleep || echo none") == "none\n"
        assert await again.output("cat", "tick") == first


async def test_it_can_be_done_again_and_again_and_for_one_that_died(rig: Rig) -> None:
    async with lasting(rig) as room:
        for number in range(3):
            await room.output("/bin/sh", "-c", f"echo {number} >> lines")
            if number == 1:
                for pid in rig.host_processes(room.name):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await stop(rig, room)
            await rig.engine.stop(room.name)
            room = await start(rig, room)
        assert await room.output("cat", "lines") == "0\n1\n2\n"


async def test_the_list_of_the_next_start_is_in_force(rig: Rig) -> None:
    async with lasting(rig) as room:
        await stop(rig, room)
        with pytest.raises(EngineError):
            await rig.engine.set_egress(room.name, HostList.parse(["name.invalid"]))
        await rig.engine.start(room.name, replace(rig.spec(), egress=HostList.parse(["192.0.2.7"])))
        again = await rig.enter(room.name)
        code = "(exec 3<>/dev/tcp/192.0.2.8/80) 2>&1 | grep -q refused && cat /etc/resolv.conf"
        said = await again.output("/bin/bash", "-c", code)
        assert str(rig.engine._network._attachment(room.name).wire.host_addresses[0]) in said


async def test_one_starts_it_and_nobody_else(rig: Rig) -> None:
    async with lasting(rig) as room:
        await stop(rig, room)
        starts = [asyncio.create_task(rig.engine.start(room.name, rig.spec())) for _ in range(3)]
        ends = await asyncio.gather(*starts, return_exceptions=True)
        assert sorted(isinstance(end, EngineError) for end in ends) == [False, True, True]
        with pytest.raises(EngineError, match="running already"):
            await rig.engine.start(room.name, rig.spec())
        assert await (await rig.enter(room.name)).output("echo", "well") == "well\n"


@pytest.mark.parametrize("end", ["stop", "destroy", "cancel"])
async def test_ended_while_it_starts(rig: Rig, end: str) -> None:
    async with lasting(rig) as room:
        await room.output("/bin/sh", "-c", "echo kept > file")
        for turns in (0, 3, 12):
            await rig.engine.stop(room.name)
            task = asyncio.create_task(rig.engine.start(room.name, rig.spec()))
            for _ in range(turns):
                await asyncio.sleep(0.005)
            if end == "cancel":
                task.cancel()
            else:
                await getattr(rig.engine, end)(room.name)
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert result is None or isinstance(result, EngineError | asyncio.CancelledError), result
            if end == "destroy":
                assert (result is None) == (room.name in await rig.engine.list())
                return
        await rig.engine.stop(room.name)
        assert left_of(rig, room.name) == []
        assert await (await start(rig, room)).output("cat", "file") == "kept\n"


async def test_destroyed_while_it_stops(rig: Rig) -> None:
    """Whichever comes first, nothing is left, and the caller who came too late is told."""
    for calls in (("stop", "destroy"), ("destroy", "stop"), ("stop", "stop")):
        async with lasting(rig) as room:
            moving = [asyncio.create_task(getattr(rig.engine, call)(room.name)) for call in calls]
            await asyncio.wait(moving)
            told = {call: task.exception() for call, task in zip(calls, moving, strict=True)}
            assert (room.name in await rig.engine.list()) == ("destroy" not in calls)
            if calls == ("destroy", "stop"):
                assert isinstance(told.pop("stop"), EngineError)
            assert set(told.values()) == {None}, told
            assert left_of(rig, room.name) == []


async def test_what_never_was_or_is_of_another_kind(rig: Rig) -> None:
    for name in ("nobody", rig.new_name()):
        with pytest.raises(EngineError):
            await rig.engine.stop(name)
        with pytest.raises(EngineError):
            await rig.engine.start(name, rig.spec())
    other = Runtime.GVISOR if rig.native else Runtime.NATIVE
    async with lasting(rig) as room:
        await stop(rig, room)
        with pytest.raises(EngineError):
            await rig.engine.start(room.name, replace(rig.spec(), runtime=other))
        await start(rig, room)


# Another daemon, another boot.


def write_back(mounted: Path) -> None:
    """As the machine does by itself every few seconds."""
    with opened(mounted, os.O_RDONLY) as folder:
        syncfs(folder)


async def test_after_a_reboot(rig: Rig) -> None:
    """Everything that lives in the machine's memory is gone, and the disk as the last write-back left it."""
    async with lasting(rig) as room:
        await room.output("/bin/bash", "-c", FILL)
        before = await room.output("/bin/bash", "-c", LOOK)
        write_back(room.paths.disk)
        image = room.paths.disk_image.read_bytes()
        id_range = Record.load(room.paths.record).id_range
        await rig.engine.destroy(room.name)
        room.paths.top.mkdir(mode=0o711)
        # As a machine that lost its power has it: no network, no groups, no state of the runtime, never unmounted.
        room.paths.disk_image.write_bytes(image)
        Record(rig.runtime.value, "host", "00" * 16, id_range, "sandbox").save(room.paths.record)
        assert not fsck.is_clean(room.paths.disk_image)
        await rig.engine.close()  # what it knew is gone with the daemon
        assert room.name in await rig.engine.list()
        assert not (await rig.engine.observe(room.name)).alive
        again = await start(rig, room)
        assert await again.output("/bin/bash", "-c", LOOK) == before
        await stop(rig, again)
        assert fsck.is_clean(room.paths.disk_image)


async def test_two_that_were_stopped_do_not_share_their_ids(rig: Rig) -> None:
    if not rig.native:
        pytest.skip("no ids of their own")
    async with lasting(rig) as one:
        await stop(rig, one)
        rig.engine._ids = IdRanges(rig.engine.layout)  # as another daemon finds them
        async with rig.room() as other:
            slots = {Record.load(each.paths.record).id_range for each in (one, other)}
        assert len(slots) == 2


async def test_a_damaged_disk_is_repaired_or_refused(rig: Rig) -> None:
    if not rig.native:
        pytest.skip("the disk is the same")
    async with lasting(rig) as room:
        await room.output("/bin/sh", "-c", "echo kept > file; mkdir -p a/b; echo b > a/b/c; sync")
        await stop(rig, room)
        # A link count that is wrong and a mark that says so, as a lost write would leave them.
        image = os.fspath(room.paths.disk_image)
        for order in ("sif /workspace/file links_count 7", "ssv state 0"):
            said = await try_tool("debugfs", "-w", "-R", order, image)
            assert len(said.output.splitlines()) == 1, said  # its name, and no complaint
        again = await start(rig, room)
        assert await again.output("stat", "-c", "%h", "file") == "1\n"
        assert await again.output("cat", "file", "a/b/c") == "kept\nb\n"
        await stop(rig, room)
        with room.paths.disk_image.open("r+b") as file:
            file.truncate(512)
        with pytest.raises(EngineError, match="cut off"):
            await rig.engine.start(room.name, rig.spec())
        assert left_of(rig, room.name) == []


# What a sandbox may have left for its next start.


async def test_nothing_that_was_left_there_is_followed(rig: Rig, tmp_path: Path) -> None:
    async with lasting(rig) as room:
        victim = tmp_path / "victim"
        victim.write_text("untouched")
        traps = f"""
import os
os.remove("/etc/resolv.conf")
os.symlink({os.fspath(victim)!r}, "/etc/resolv.conf")
os.chdir("/run/k8e")
os.symlink({os.fspath(victim)!r}, "link")
os.mkfifo("pipe")
for _ in range(200):
    os.mkdir("deep")
    os.chdir("deep")
"""
        done = await room.as_agent("/usr/bin/python3", "-c", traps)
        assert done.outcome.exit_code == 0, done
        await stop(rig, room)
        again = await start(rig, room)
        assert victim.read_text() == "untouched"
        assert (await again.output("cat", "/etc/resolv.conf")).startswith("nameserver ")
        listed = [entry.name for entry in await again.link.list_dir(b"/run/k8e")]
        assert listed == [b"agent.sock"]
        # The root of the sandbox can do that to its /etc as well.
        await room_rename(again)
        await stop(rig, again)
        assert await (await start(rig, again)).output("echo", "well") == "well\n"


async def room_rename(room: Room) -> None:
    done = await room.as_agent("/bin/sh", "-c", "mv /etc /etc-was && ln -s /proc/self/root/etc-was /etc")
    assert done.outcome.exit_code == 0, done


def test_a_folder_is_emptied_however_deep_it_is(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays")
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(1200):  # more than a recursion could take
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.symlink(outside, "link", dir_fd=inner)
        os.close(folder)
        folder = inner
    os.close(folder)
    empty_folder(top, os.geteuid())
    assert os.listdir(top) == []
    assert (outside / "file").read_text() == "stays"
