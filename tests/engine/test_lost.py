"""The inside is lost: the attacker is gVisor's kernel, its gofer, or root of a native sandbox with all nine powers.
What must hold on the machine holds all the same, because the machine's kernel keeps it (docs/security.md)."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, Shape
from k8e.engine.local.toolchain.registries import Registries
from tests.engine.grounds import Grounds, open_grounds
from tests.engine.lost.attempts import ABSTRACT, FOLLOW_NOT, Ground, list_attempts
from tests.engine.lost.script import Attempt, Outcome, build_probe, read_outcomes, write_script
from tests.engine.rig import Rig, Room, read_host
from tests.engine.traces import living_processes

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe knows the calls of x86_64")

GVISOR = {"gofer": b"runsc-gofer", "sandbox": b"runsc-sandbox"}
NATIVE = ("root", "user")
SIGSYS = 31


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("lost") / "probe"
    build_probe(target)
    return target


@pytest.fixture(scope="module")
def grounds(rig: Rig) -> Iterator[Grounds]:
    with open_grounds() as grounds:
        yield grounds


@pytest.fixture(scope="module", params=["created", "bound"])
async def guest(request: pytest.FixtureRequest, rig: Rig, grounds: Grounds) -> AsyncIterator[Room]:
    room = await rig.shaped(Shape(mounts=grounds.mounts()), late=request.param == "bound")
    yield room
    await rig.engine.destroy(room.name)


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""  # ended since it was listed


def find_process(rig: Rig, room: Room, name: bytes) -> int:
    processes = rig.host_processes(room.name)
    found = [pid for pid in processes if read_command(pid).split(b"\0")[0] == name]
    assert len(found) == 1, (name, found)
    return found[0]


def find_top(pid: int) -> int:
    """The descriptor of the sandbox's root that a process of gVisor holds."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{name}") == "/root":
            return int(name)
    raise AssertionError(f"process {pid} has no descriptor of the sandbox's root")


def try_at(probe: Path, pid: int, attempts: Sequence[Attempt], script: Path) -> list[Outcome]:
    script.write_text(write_script(attempts))
    done = subprocess.run([probe, str(pid), script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    outcomes = read_outcomes(done.stdout)
    assert len(outcomes) == len(attempts), done
    return outcomes


async def try_inside(room: Room, who: str, probe: Path, attempts: Sequence[Attempt]) -> list[Outcome]:
    program = await asyncio.to_thread(probe.read_bytes)
    await room.link.write_file(b"/tmp/probe", program, mode=0o755)
    await room.link.write_file(b"/tmp/script", write_script(attempts).encode(), mode=0o644)
    done = await (room.as_agent if who == "root" else room.run)("/tmp/probe", "0", "/tmp/script")
    assert done.outcome.exit_code == 0, done
    outcomes = read_outcomes(done.stdout.decode())
    assert len(outcomes) == len(attempts), done
    return outcomes


def find_allowed(attempts: Sequence[Attempt], outcomes: Sequence[Outcome]) -> list[str]:
    """Attempts that did not end in a refusal of their last call; also those that never came that far."""
    wrong = []
    for attempt, outcome in zip(attempts, outcomes, strict=True):
        # A filter may end the process sooner, at a call that leads there.
        killed = outcome.killed == SIGSYS and min(outcome.results, default=0) >= 0
        *way, last = outcome.results or (0,)
        refused = outcome.killed is None and len(way) + 1 == len(attempt.calls) and min(way, default=0) >= 0 > last
        if not killed and not refused:
            wrong.append(f"{attempt.name}: {outcome.describe()}")
    return wrong


def picture(project: Path) -> list[tuple[str, int, int, int, bytes]]:
    """Reads what must stay as it was: names, inodes, modes and owners of all, and the content of what is kept."""
    found = []
    for path in sorted(project.rglob("*")):
        status = path.lstat()
        kept = path.name in ("config", "Makefile", "private") and stat.S_ISREG(status.st_mode)
        found.append((str(path), status.st_ino, status.st_mode, status.st_uid, path.read_bytes() if kept else b""))
    return found


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Something of the machine to reach."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(ABSTRACT)
        listener.listen()
        listener.setblocking(False)
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(ABSTRACT)
        listener.accept()[0].close()
        yield listener


def lay_ground(rig: Rig, pid: int) -> Ground:
    if rig.native:
        return Ground(-100, "/workspace", "/home/user")
    gofer_or_sandbox = Path(f"/proc/{pid}/fd")
    bound = any(os.readlink(name).startswith("/root/run/k8e-slots") for name in gofer_or_sandbox.iterdir())
    places = ("run/k8e-slots/0", "run/k8e-slots/1") if bound else ("workspace", "home/user")
    return Ground(find_top(pid), *places)


def write_control(ground: Ground, name: str) -> Attempt:
    """Attempts that a process may make, so that it is seen that the others are refused for what they ask."""
    control = Attempt("control")
    made = control.call(
        "openat", ground.open(control, ground.project), name, os.O_CREAT | os.O_RDWR | FOLLOW_NOT, 0o644
    )
    control.call("write", made, "here\n", 5)
    control.call("fchmod", made, 0o1600)
    return control


@pytest.mark.parametrize("who", [*GVISOR, *NATIVE])
async def test_nothing_is_gained_on_the_machine(
    rig: Rig, guest: Room, grounds: Grounds, probe: Path, listener: socket.socket, who: str, tmp_path: Path
) -> None:
    if rig.native != (who in NATIVE):
        pytest.skip("that process is not here")
    pid = 0 if rig.native else find_process(rig, guest, GVISOR[who])
    ground = lay_ground(rig, pid)
    control, attempts = write_control(ground, f"made-by-{who}"), list_attempts(ground, native=rig.native)
    before = picture(grounds.project)
    if rig.native:
        first, *outcomes = await try_inside(guest, who, probe, [control, *attempts])
    else:
        script = tmp_path / "script"
        first, *outcomes = await asyncio.to_thread(try_at, probe, pid, [control, *attempts], script)
    made = grounds.project / f"made-by-{who}"
    if who != "root":  # whom the project does not know
        assert (first.killed, min(first.results) >= 0) == (None, True), first
        assert made.read_text() == "here\n"
        made.unlink()
    assert find_allowed(attempts, outcomes) == []
    assert picture(grounds.project) == before
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert await guest.output("echo", "well") == "well\n"


@pytest.mark.parametrize("who", GVISOR)
async def test_a_process_of_gvisor_can_fill_no_file_of_the_machine(rig: Rig, guest: Room, who: str) -> None:
    """Whatever it can write to by a descriptor is on the sandbox's own disk or in its memory."""
    if rig.native:
        pytest.skip("about gVisor")
    pid, disk = find_process(rig, guest, GVISOR[who]), os.stat(guest.paths.disk).st_dev
    writable = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        status = os.stat(f"/proc/{pid}/fd/{name}")
        fields = dict(line.split(":", 1) for line in read_host(f"/proc/{pid}/fdinfo/{name}").splitlines())
        if stat.S_ISREG(status.st_mode) and int(fields["flags"], 8) & (os.O_WRONLY | os.O_RDWR) and status.st_nlink:
            writable.append(os.readlink(f"/proc/{pid}/fd/{name}"))  # memory has no name, and is not counted
            assert status.st_dev == disk, writable[-1]
    assert str(guest.paths.runtime_log) in writable


async def test_all_processes_of_a_sandbox_are_in_its_cgroup(rig: Rig, guest: Room) -> None:
    """Where its limits are."""
    inside = rig.host_processes(guest.name)
    named = [pid for pid, _ in living_processes() if guest.name.encode() in read_command(pid)]
    assert set(named) <= inside
    assert rig.native or len(named) >= len(GVISOR)


async def test_hidden_files_of_the_machine_are_not_there_for_gvisor_either(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a configuration of npm below /usr with a token in it."""
    if rig.native:
        pytest.skip("about gVisor")
    hidden, seen = "/usr/bin/env", "/usr/bin/id"
    templates = rig.engine._templates
    registries = replace(await templates.registries(), hidden=(hidden,))

    async def answer() -> Registries:
        return registries

    monkeypatch.setattr(templates, "registries", answer)
    async with rig.room() as room:
        assert await room.output("cat", hidden) == ""
        for name in GVISOR.values():
            pid = find_process(rig, room, name)
            handle = os.open(f"/proc/{pid}/fd/{find_top(pid)}", os.O_PATH)
            try:
                assert os.stat(hidden.lstrip("/"), dir_fd=handle).st_size == 0
                assert os.stat(seen.lstrip("/"), dir_fd=handle).st_size == os.stat(seen).st_size
            finally:
                os.close(handle)


async def test_what_is_read_only_is_so_for_gvisor_too(rig: Rig, probe: Path, tmp_path: Path) -> None:
    if rig.native:
        pytest.skip("about gVisor")
    room = await rig.shaped(Shape(read_only=True))
    for name in GVISOR.values():
        pid = find_process(rig, room, name)
        attempts = []
        for folder in ("etc", "workspace", "home/user", "usr/bin", "tmp"):
            attempts.append(Attempt(folder))
            flags = os.O_CREAT | os.O_WRONLY | FOLLOW_NOT
            attempts[-1].call("openat", find_top(pid), f"{folder}/made-by-{pid}", flags, 0o644)
        *closed, temporary = await asyncio.to_thread(try_at, probe, pid, attempts, tmp_path / "script")
        assert [outcome.describe() for outcome in closed] == ["EROFS"] * len(closed)
        assert temporary.results[0] >= 0, "it can write where it may"
    await rig.engine.destroy(room.name)


async def test_a_sandbox_whose_processes_are_not_found_is_not_given_a_project(
    rig: Rig, grounds: Grounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept parts could not be held against them."""
    if rig.native:
        pytest.skip("about gVisor")
    before = set(await rig.engine.list())
    monkeypatch.setattr(rig.engine._cgroups, "processes", lambda sandbox: {os.getpid()})
    with pytest.raises(EngineError, match="kept parts"):
        await rig.shaped(Shape(mounts=grounds.mounts()), late=True)
    monkeypatch.undo()
    for name in set(await rig.engine.list()) - before:
        await rig.engine.destroy(name)
