"""A sandbox uses up its own share, and no other's. No test here measures time: a neighbour that answers
while the other side does its worst is all the responsiveness that is claimed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import Observation
from k8e.engine.local.runtime.bundle import PARKED_TASKS
from k8e.link.errors import AgentError, LinkError
from k8e.link.model import ExecOptions, Process
from tests.engine.rig import LIMITS, ROOT, Rig, Room, eventually, read_host

TIGHT = replace(LIMITS, cpus=0.5, memory=192 << 20, pids=64)
MOST = TIGHT.pids + PARKED_TASKS  # room that parked interpreters have on top; who stops them can use it
ANYBODY = pytest.mark.parametrize("options", [{}, {"identity": ROOT}], ids=["user", "root"])

FORK_BOMB = """
import os, sys
print("lit", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
THREAD_BOMB = """
import threading, time
print("lit", flush=True)
while True:
    try:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    except (RuntimeError, MemoryError):
        time.sleep(0.01)
"""
SHELL_BOMB = "echo lit; bomb() { bomb | bomb & }; bomb; wait; while true; do bomb; done"


def read_limit(rig: Rig, name: str, *files: str) -> str:
    """From whichever control group has one of the files: version 1 and 2 spell them differently."""
    for group in rig.cgroups(name):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                return read_host(group / file).strip()
    raise AssertionError(f"no {files} in {rig.cgroups(name)}")


async def put_out(process: Process) -> None:
    """Ends it and everything that it became."""
    process.discard()
    await process.end(0)
    await process.wait()


@pytest.mark.parametrize("bomb", ["fork", "thread", "shell"])
async def test_a_bomb_is_contained(rig: Rig, room: Room, bomb: str) -> None:
    async with rig.room(TIGHT) as victim:
        if bomb == "shell":
            spec = victim.spec("bash", "-c", SHELL_BOMB)
        else:
            spec = victim.spec("/usr/bin/python3", "-S", "-c", FORK_BOMB if bomb == "fork" else THREAD_BOMB)
        process = await victim.link.start(spec)
        assert await process.stdout.read() == b"lit\n"
        allowed = int(read_limit(rig, victim.name, "pids.max"))
        assert allowed <= (MOST if rig.native else 4 * TIGHT.pids + 1024)
        for _ in range(5):
            assert await room.output("echo", "neighbour") == "neighbour\n"
            assert int(read_limit(rig, victim.name, "pids.current")) <= allowed
        if rig.native:
            await put_out(process)
            assert await victim.output("echo", "well") == "well\n"
        else:
            # gVisor may die of it: the host's limit is a backstop that its own kernel does not survive.
            with contextlib.suppress(LinkError):
                await rig.unless_dead(victim.name, put_out(process))
                await rig.unless_dead(victim.name, victim.run("echo", "well"))


@pytest.mark.parametrize("kind", ["processes", "threads"])
async def test_the_number_of_processes_is_limited(rig: Rig, kind: str) -> None:
    code = """
import os, sys, threading, time
count = 0
try:
    while count < 5000:
        if sys.argv[1] == "threads":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif os.fork() == 0:
            time.sleep(1000)
        count += 1
except (OSError, RuntimeError):
    pass
print(count, flush=True)
os.kill(0, 9)
"""
    async with rig.room(TIGHT) as room:
        done = await rig.unless_dead(room.name, room.python(code, kind))
        if done is None:
            assert not rig.native
        else:
            assert 10 < int(done.stdout) <= MOST, done
            await eventually(lambda: can_run(room), "a command runs again after the many are gone")


async def can_run(room: Room) -> bool:
    try:
        return (await room.run("true")).outcome.exit_code == 0
    except AgentError:
        return False


MEMORY_BOMB = """
import sys
blocks = []
while True:
    blocks.append(b"x" * (1 << 22))
"""
BOMBS = {
    "one process": MEMORY_BOMB,
    "many processes": "import os\nfor _ in range(4): os.fork()\n" + MEMORY_BOMB,
    "shared memory": """
import mmap
maps = []
while True:
    maps.append(mmap.mmap(-1, 1 << 22))
    maps[-1].write(b"x" * (1 << 22))
""",
    "memory files": """
import os
while True:
    handle = os.memfd_create("bomb")
    os.write(handle, b"x" * (1 << 22))
""",
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_memory_bomb_is_reported_as_such(rig: Rig, room: Room, bomb: str) -> None:
    async with rig.room(TIGHT) as victim:
        bystander = await victim.link.start(victim.spec("sleep", "1000"))
        assert await rig.engine.observe(victim.name) == Observation(alive=True, oom_kills=0)
        done = await rig.unless_dead(victim.name, victim.python(BOMBS[bomb]))
        assert await room.output("echo", "neighbour") == "neighbour\n"
        seen = await rig.engine.observe(victim.name)
        assert seen.oom_kills >= 1
        if rig.native:
            assert done is not None
            assert done.outcome.signal == 9 or done.outcome.exit_code != 0
            assert seen.alive
            assert await victim.output("echo", "well") == "well\n"
            assert bystander.id in {info.id for info in await victim.link.commands() if info.running}
        bystander.discard()


async def test_memory_of_files_is_limited_too(rig: Rig) -> None:
    """/dev/shm is memory: it ends before the sandbox's memory does."""
    async with rig.room(TIGHT) as room:
        done = await room.run(
            "bash", "-c", "head -c 1G /dev/zero > /dev/shm/fill; stat -c %s /dev/shm/fill; rm /dev/shm/fill"
        )
        assert b"No space left" in done.stderr, done
        assert int(done.stdout) <= TIGHT.memory // 2
        assert (await rig.engine.observe(room.name)).oom_kills == 0


async def test_the_limits_are_in_the_control_groups(rig: Rig) -> None:
    async with rig.room(TIGHT) as room:
        assert int(read_limit(rig, room.name, "memory.limit_in_bytes", "memory.max")) == TIGHT.memory
        quota = read_limit(rig, room.name, "cpu.cfs_quota_us", "cpu.max").split()[0]
        period = read_limit(rig, room.name, "cpu.cfs_period_us", "cpu.max").split()[-1]
        assert int(quota) / int(period) == TIGHT.cpus
        assert read_limit(rig, room.name, "cpu.cfs_burst_us", "cpu.max.burst") == quota
        pids = int(read_limit(rig, room.name, "pids.max"))
        assert pids == MOST if rig.native else TIGHT.pids < pids < 4 * TIGHT.pids + 1024
        inside = rig.host_processes(room.name)
        assert inside
        for pid in inside:  # and everything of the sandbox is in them
            groups = read_host(f"/proc/{pid}/cgroup").splitlines()
            for controller in ("memory", "pids", "cpu"):
                (line,) = [g for g in groups if controller in g.split(":")[1].split(",")] or groups[-1:]
                assert line.endswith(f"/{rig.engine.layout.cgroup}/{room.name}"), line


async def test_no_process_of_the_sandbox_is_outside_its_groups(rig: Rig, room: Room) -> None:
    """Found by the namespaces they are in, not by the groups."""
    process = await room.link.start(room.spec("bash", "-c", "sleep 1000 & setsid sleep 1000 & echo on; wait"))
    assert await process.stdout.read() == b"on\n"
    grouped = rig.host_processes(room.name)
    spaces = {read_link(f"/proc/{pid}/ns/pid") for pid in grouped} - {read_link("/proc/self/ns/pid"), ""}
    assert spaces
    inside = {int(name.name) for name in list_processes() if read_link(f"{name}/ns/pid") in spaces}
    assert inside <= rig.host_processes(room.name)
    await process.end(0)
    process.discard()
    await process.wait()


def list_processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def read_link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


async def test_spinning_sandboxes_leave_the_others_their_turn(rig: Rig) -> None:
    spin = "import os\nos.fork(); os.fork()\nprint('on', flush=True)\nwhile True: pass"
    async with contextlib.AsyncExitStack() as stack:
        spinners = await asyncio.gather(
            *(stack.enter_async_context(rig.room(replace(TIGHT, cpus=0.1, disk=64 << 20))) for _ in range(4))
        )
        neighbour = await stack.enter_async_context(rig.room(TIGHT))
        for spinner in spinners:
            process = await spinner.link.start(spinner.spec("/usr/bin/python3", "-S", "-c", spin))
            assert (await process.stdout.read()).startswith(b"on\n")
            process.discard()
        for number in range(10):
            assert await neighbour.output("bash", "-c", f"echo $(({number} * 2))") == f"{number * 2}\n"
        # The spinners themselves answer as well: the agent has a share of what is theirs.
        assert await spinners[0].output("echo", "dizzy") == "dizzy\n"


@ANYBODY
async def test_open_files_are_limited(room: Room, options: ExecOptions) -> None:
    code = """
import errno, os
count = 0
try:
    while count < 1 << 20:
        os.open("/", os.O_RDONLY)
        count += 1
except OSError as error:
    print(count, errno.errorcode[error.errno])
"""
    done = await room.python(code, **options)
    count, why = done.stdout.decode().split()
    assert why == "EMFILE"
    assert LIMITS.open_files - 16 <= int(count) <= LIMITS.open_files
    assert await room.output("echo", "well") == "well\n"


async def test_core_dumps_are_off(room: Room) -> None:
    done = await room.run("bash", "-c", "ulimit -c; kill -SEGV $$")
    assert done.stdout == b"0\n"
    assert done.outcome.signal == 11
    names = {entry.name for entry in await room.link.list_dir(b"/workspace")}
    assert not any(name.startswith(b"core") for name in names)


async def test_priorities_cannot_be_raised(rig: Rig, room: Room) -> None:
    if not rig.native:
        pytest.skip("priorities inside gVisor are known to its own kernel only")
    code = """
import os
try:
    os.nice(-5)
except OSError:
    pass
print(os.nice(0))
"""
    for options in (ExecOptions(), ExecOptions(identity=ROOT)):
        done = await room.python(code, **options)
        assert done.stdout == b"0\n", done
