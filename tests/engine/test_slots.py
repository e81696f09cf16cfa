"""Sandboxes that are made before it is known whose directories they will show: what they are until then, how they get
them, and that nothing of the way there is left, inside or outside. (What holds afterwards is in test_mounts.py.)"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from k8e.core.sessions.interpreters import BASH, PYTHON, Kind, plan
from k8e.engine import EngineError, Mount, MountRefused, Shape
from k8e.engine.local.mounts.slots import TRAY
from k8e.engine.local.record import Record
from k8e.link.model import AGENT, ExecOptions
from tests.engine.grounds import OWNER, SECRET, Grounds, open_grounds
from tests.engine.rig import Rig, Room
from tests.engine.tiny_images import add_image
from tests.engine.traces import mount_points

STRONGEST: ExecOptions = {"identity": AGENT, "keep_capabilities": True}
BOTH: tuple[ExecOptions, ...] = ({}, STRONGEST)
ADMIN = 1 << 21
UNBOUND = Shape(slots=("/workspace", "/home/user"))
MOUNTING = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for call in (
    lambda: libc.mount(b"/tmp", b"/workspace", b"", 0x1000, None),
    lambda: libc.mount(b"", b"/workspace/.git", b"", 0x1026, None),
    lambda: libc.mount(b"none", b"/workspace", b"tmpfs", 0, None),
    lambda: libc.umount2(b"/workspace", 2),
    lambda: libc.umount2(b"/workspace/.git", 0),
):
    ctypes.set_errno(0)
    assert call() == -1, "it worked"
    assert ctypes.get_errno() == errno.EPERM, os.strerror(ctypes.get_errno())
"""
WHERE = """
import os, sys
import beside
print(os.getcwd(), os.readlink("/proc/self" + "/cwd"), repr(sys.path[0]), beside.word, sorted(os.listdir())[0])
"""


@pytest.fixture(scope="module")
def grounds() -> Iterator[Grounds]:
    with open_grounds() as grounds:
        (grounds.project / "beside.py").write_text("word = 'imported'\n")
        yield grounds


@pytest.fixture
async def unbound(rig: Rig) -> AsyncIterator[Room]:
    room = await rig.shaped(UNBOUND)
    yield room
    await rig.engine.destroy(room.name)


@pytest.fixture(scope="module")
async def bound(rig: Rig, grounds: Grounds) -> AsyncIterator[Room]:
    room = await rig.shaped(Shape(mounts=grounds.mounts()), late=True)
    yield room
    await rig.engine.destroy(room.name)


async def held(room: Room) -> dict[str, int]:
    status = (await room.link.read_file(b"/proc/1/status")).decode()
    return {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}


# Until then


async def test_it_shows_its_own_workspace_and_nothing_of_anybody(rig: Rig, unbound: Room) -> None:
    assert await unbound.output("sh", "-c", "echo own > file; cat file; ls -A /workspace /home/user") == (
        "own\n/home/user:\n\n/workspace:\nfile\n"
    )
    assert not (await held(unbound))["CapBnd:"] & ADMIN
    for options in BOTH:
        await unbound.output("python3", "-S", "-c", MOUNTING, **options)
    if not rig.native:
        with pytest.raises(EngineError, match="did not mount"):  # too late: a command has run
            await rig.engine.bind(unbound.name, (Mount("/usr", "/workspace", 0), Mount("/usr", "/home/user", 0)))


async def test_whoever_is_root_there_cannot_be_on_the_tray_first(rig: Rig, unbound: Room) -> None:
    if rig.native:
        pytest.skip("there is none")
    assert (await unbound.run("ls", TRAY)).outcome.exit_code != 0
    script = f"cd {TRAY}; mkdir 0; ln -s /etc 0; > x; mv empty 0; rmdir empty; chmod 777 .; mount -o remount,rw ."
    await unbound.run("sh", "-c", script, **STRONGEST)
    assert [path.name for path in unbound.paths.slots.iterdir()] == ["empty"]
    assert unbound.paths.slots.stat().st_mode & 0o777 == 0o700


async def test_only_gvisors_agent_can_mount_and_only_until_then(rig: Rig, grounds: Grounds, unbound: Room) -> None:
    before = await held(unbound)
    assert all(bool(before[name] & ADMIN) is not rig.native for name in ("CapEff:", "CapPrm:", "CapBnd:"))
    async with rig.room() as plain:
        assert not any(value & ADMIN for value in (await held(plain)).values())
    await rig.engine.bind(unbound.name, grounds.mounts())
    after = await held(unbound)
    assert not any(value & ADMIN for value in after.values())
    assert {name: value & ~ADMIN for name, value in before.items()} == after


# Binding


async def test_only_what_it_has_slots_for_and_once(rig: Rig, grounds: Grounds) -> None:
    shape = Shape(mounts=(grounds.project_mount(),))
    async with rig.room() as plain:
        with pytest.raises(EngineError, match="slots for nothing"):
            await rig.engine.bind(plain.name, shape.mounts)
    room = await rig.shaped(shape.unbound)
    for wrong in ((), grounds.mounts(), (grounds.home_mount(),)):
        with pytest.raises(EngineError, match="slots for /workspace"):
            await rig.engine.bind(room.name, wrong)
    await rig.engine.bind(room.name, shape.mounts)
    with pytest.raises(EngineError, match="slots for nothing"):
        await rig.engine.bind(room.name, shape.mounts)
    assert await room.output("cat", "private") == "the owner's\n"
    await rig.engine.destroy(room.name)


async def test_what_is_refused_leaves_nothing(rig: Rig, grounds: Grounds) -> None:
    before = sorted(grounds.top.rglob("*"))
    for mount in (Mount("/", "/workspace", 0), Mount(str(grounds.roots), "/workspace", OWNER)):
        room = await rig.shaped(Shape(slots=("/home/user", "/workspace")))
        with pytest.raises(MountRefused):
            await rig.engine.bind(room.name, (grounds.home_mount(), mount))
        await rig.engine.destroy(room.name)
    assert sorted(grounds.top.rglob("*")) == before


async def test_destroyed_while_it_is_bound(rig: Rig, grounds: Grounds) -> None:
    before = sorted(grounds.top.rglob("*"))
    for turns in (0, 3, 10):
        room = await rig.shaped(UNBOUND)
        binding = asyncio.create_task(rig.engine.bind(room.name, grounds.mounts()))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        await rig.engine.destroy(room.name)
        (result,) = await asyncio.gather(binding, return_exceptions=True)
        assert result is None or isinstance(result, EngineError), result
        assert room.name not in await rig.engine.list()
    assert sorted(grounds.top.rglob("*")) == before


# Afterwards


async def test_nothing_of_the_way_is_left(rig: Rig, bound: Room) -> None:
    for options in BOTH:
        table = await bound.output("cat", "/proc/self/mountinfo", **options)
        assert TRAY not in table
        assert SECRET not in table
        assert "k8e-slots" not in await bound.output("ls", "-A", "/run", **options)
        assert (await bound.run("ls", TRAY, **options)).outcome.exit_code != 0
    assert not [point for point in mount_points() if point.startswith(str(bound.paths.slots))]
    assert Record.load(bound.paths.record).slots == ()


async def test_nobody_gets_to_what_lies_below_or_beside(bound: Room) -> None:
    """By a directory that was entered, a descriptor, a path through /proc, or up from the mount."""
    script = (
        "for d in /proc/[0-9]*; do ls $d/cwd/ $d/root/run/ 2>/dev/null; done; cd /workspace/..; pwd; ls;"
        "cd /workspace; ls ..; cat ../0/private ../1/.ssh/id_ed25519 ../../project/private; true"
    )
    for options in BOTH:
        done = await bound.run("sh", "-c", script, **options)
        assert b"k8e-slots" not in done.stdout
        assert b"mount-" not in done.stdout
        assert b"id_ed25519" not in done.stdout
        await bound.output("python3", "-S", "-c", MOUNTING, **options)


async def test_the_mounts_on_the_machine_are_those_of_any_other(bound: Room, grounds: Grounds) -> None:
    (project, _) = sorted(bound.paths.mounts.iterdir())
    with pytest.raises(OSError, match="Read-only"):
        (project / "private").unlink()
    with pytest.raises(OSError, match="busy"):
        (grounds.project / ".git/config").rename(grounds.project / "config")


@pytest.mark.parametrize("kind", [PYTHON, BASH], ids=["python", "bash"])
async def test_what_was_parked_before_works_there(rig: Rig, grounds: Grounds, kind: Kind) -> None:
    room = await rig.shaped(Shape(slots=("/workspace",)))
    await room.link.park(plan(kind, room.place, ()), room.place.loader)
    await rig.engine.bind(room.name, (grounds.project_mount(),))
    code = WHERE if kind == PYTHON else "pwd -P; ls Makefile; echo x > made; rm made"
    spec = replace(plan(kind, room.place, ()), argv=(*kind, code.encode()), parked=True, stdin=False)
    process = await room.link.start(spec)
    output = b""
    while content := await process.stdout.read():
        output += content
    outcome = await process.wait()
    assert process.handed_over
    assert outcome.exit_code == 0, output
    assert output.decode() == (
        "/workspace /workspace '' imported .envrc\n" if kind == PYTHON else "/workspace\nMakefile\n"
    )
    await room.link.park(plan(kind, room.place, ()), room.place.loader)  # the next one, in what is there now
    await rig.engine.destroy(room.name)
    shutil.rmtree(grounds.project / "__pycache__", ignore_errors=True)


async def test_it_is_stopped_and_started_like_any_other(rig: Rig) -> None:
    with open_grounds() as grounds:
        before = sorted(grounds.top.rglob("*"))
        shape = Shape(mounts=grounds.mounts())
        room = await rig.shaped(shape, late=True)
        await room.output("sh", "-c", "echo x > /tmp/kept; echo x > new")
        await rig.engine.stop(room.name)
        assert sorted(path for path in grounds.top.rglob("*") if path.name != "new") == before
        assert not room.paths.slots.exists()
        await rig.engine.start(room.name, replace(rig.spec(), shape=shape))
        room = await rig.enter(room.name)
        assert await room.output("cat", "private", "/tmp/kept", "new") == "the owner's\nx\nx\n"
        assert (await room.run("sh", "-c", "mv .git x || echo x > .git/config")).outcome.exit_code != 0
        await rig.engine.destroy(room.name)


async def test_another_engine_finds_it_and_binds_it(rig: Rig, grounds: Grounds) -> None:
    """A daemon was started again between the two."""
    room = await rig.shaped(UNBOUND)
    await rig.engine.close()
    await rig.engine.bind(room.name, grounds.mounts())
    room = await rig.enter(room.name)
    assert await room.output("cat", "private") == "the owner's\n"
    await rig.engine.destroy(room.name)


async def test_the_root_of_an_image_gains_nothing_by_it(rig: Rig, grounds: Grounds) -> None:
    """Its commands keep the agent's capabilities, and so do its parked interpreters."""
    image = await add_image(rig.engine)
    room = await rig.shaped(Shape(mounts=(grounds.project_mount(),)), late=True, image=image.digest)
    assert room.place.capable
    status = await room.output("cat", "/proc/self/status")
    found = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}
    assert found["CapEff:"]
    assert not any(value & ADMIN for value in found.values())
    assert (await room.run("umount", "-l", "/workspace")).outcome.exit_code != 0
    assert (await room.run("mv", ".git", "x")).outcome.exit_code != 0
    await rig.engine.destroy(room.name)


RACE = f"""
import os, threading
os.write(63, b"P")
def attack(*attempts):
    while True:
        for source, target in attempts:
            try:
                os.rename(source, target)
            except OSError:
                pass
try:
    tray = os.open("{TRAY}", os.O_RDONLY)
except OSError:
    tray = -1
for place in ("/workspace", "{TRAY}/0", f"/proc/self/fd/{{tray}}/0"):
    pairs = [(f"{{place}}/.git", f"{{place}}/gone"), (f"{{place}}/.git/config", f"{{place}}/config")]
    threading.Thread(target=attack, args=pairs).start()
"""


@pytest.mark.parametrize("strongest", [False, True], ids=["user", "root"])
async def test_an_image_s_own_interpreter_does_not_get_in_between(rig: Rig, strongest: bool) -> None:
    """It is parked before, and is the image's program: at it all the time. One that is root there, which the service
    parks only afterwards (a hand on the tray is of use to it when the sandbox ends), does not either."""
    with open_grounds() as grounds:

        def look() -> list[str]:
            return sorted(path.name for path in (*grounds.project.iterdir(), *(grounds.project / ".git").iterdir()))

        before = look()
        for _ in range(2):
            room = await rig.shaped(Shape(slots=("/workspace",)))
            attacker = replace(plan(PYTHON, room.place, ()), argv=(*PYTHON, RACE.encode()))
            if strongest:
                attacker = replace(attacker, identity=AGENT, keep_capabilities=True)
            await room.link.park(attacker, b"/none.so")
            await rig.engine.bind(room.name, (replace(grounds.project_mount(), kept=(".git",)),))
            await room.output("sleep", "0.2")
            assert look() == before
            await rig.engine.destroy(room.name)
            if strongest and (grounds.project / "gone").exists():
                (grounds.project / "gone").rename(grounds.project / ".git")
            assert look() == before
