"""Programs under the supervisor: ready before others start, started again, taken over, ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from k8e.cluster.child import list_programs
from k8e.cluster.errors import StartFailed
from k8e.cluster.limits import Groups, Limits
from k8e.cluster.supervisor import Program, Supervisor, Timing, limit_log

SLEEP = [sys.executable, "-c", "import time; print('runs', flush=True)\nwhile True: time.sleep(1000)"]
QUICK = Timing(first_pause=0.05, interval=0.05, strikes=3, log_size=1000)
# A supervisor that a test kills: starts the programs that it is told, says so, and stays.
LONELY = """
import asyncio, os, pathlib, sys
from k8e.cluster.supervisor import Program, Supervisor
async def main():
    supervisor = Supervisor(pathlib.Path(sys.argv[1]), {"PATH": os.environ["PATH"]})
    for name in sys.argv[2].split():
        await supervisor.start(Program(name, sys.argv[3:]))
    print("started", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def make(folder: Path) -> Supervisor:
    return Supervisor(folder, {"PATH": os.environ["PATH"]}, QUICK)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = make(tmp_path)
    yield supervisor
    await supervisor.stop()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.02)


async def never() -> bool:
    return False


def read_notes(folder: Path) -> str:
    path = folder / "supervisor.log"
    return path.read_text() if path.exists() else ""


Leave = Callable[[str], dict[str, int]]


@pytest.fixture
def leave_programs(tmp_path: Path) -> Iterator[Leave]:
    """Starts programs with a supervisor that is killed; returns their pids."""

    def leave(names: str) -> dict[str, int]:
        command = [sys.executable, "-c", LONELY, str(tmp_path), names, *SLEEP]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            process.kill()
        return list_programs(tmp_path)

    yield leave
    for pid in list_programs(tmp_path).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_program_is_started_when_it_is_ready(supervisor: Supervisor, tmp_path: Path) -> None:
    async def is_ready() -> bool:
        return "runs" in (tmp_path / "one.log").read_text()

    await supervisor.start(Program("one", SLEEP, is_ready))
    assert is_alive(supervisor.pids["one"])
    assert list_programs(tmp_path) == supervisor.pids


async def test_a_program_that_ends_too_early_is_an_error_with_its_last_words(supervisor: Supervisor) -> None:
    with pytest.raises(StartFailed, match="one does not start: it ended with 3") as caught:
        await supervisor.start(Program("one", ["/bin/sh", "-c", "echo no disk; exit 3"], never))
    assert caught.value.detail == "no disk"


async def test_a_program_that_is_missing_is_an_error(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="it cannot be executed"):
        await supervisor.start(Program("one", [str(tmp_path / "missing")]))


async def test_a_program_that_is_not_ready_in_time_is_an_error(supervisor: Supervisor) -> None:
    with pytest.raises(StartFailed, match="it was not ready after 0 s"):
        await supervisor.start(Program("one", SLEEP, never, patience=0.1))


async def test_a_program_that_is_killed_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start(Program("one", SLEEP))
    for _ in range(3):
        before = supervisor.pids["one"]
        os.kill(before, signal.SIGKILL)
        await until(lambda before=before: supervisor.pids.get("one", before) != before)  # type: ignore[misc]
    assert is_alive(supervisor.pids["one"])
    assert read_notes(tmp_path).count("one ended with -9") == 3


async def test_a_program_that_is_gone_from_the_disk_is_tried_until_it_is_back(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\nexec sleep 1000\n")
    path.chmod(0o755)
    await supervisor.start(Program("one", [str(path)]))
    before = supervisor.pids["one"]
    path.rename(tmp_path / "away")
    os.kill(before, signal.SIGKILL)
    await until(lambda: "tried again" in read_notes(tmp_path))
    (tmp_path / "away").rename(path)
    await until(lambda: supervisor.pids.get("one", before) != before)


async def test_a_program_that_stays_sick_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    async def is_well() -> bool:
        return not (tmp_path / "sick").exists()

    await supervisor.start(Program("one", SLEEP, health=is_well))
    before = supervisor.pids["one"]
    (tmp_path / "sick").touch()
    await until(lambda: supervisor.pids.get("one", before) != before)
    (tmp_path / "sick").unlink()
    assert "one was not well for 3 questions" in read_notes(tmp_path)


async def test_a_program_has_the_user_that_it_should_have(supervisor: Supervisor) -> None:
    await supervisor.start(Program("one", ["/bin/sleep", "1000"], user=4711))
    status = await anyio.Path(f"/proc/{supervisor.pids['one']}/status").read_text()
    lines = {line.partition(":")[0]: line.split()[1:] for line in status.splitlines()}
    assert (lines["Uid"], lines["Gid"], lines["Groups"]) == (["4711"] * 4, ["4711"] * 4, [])
    assert lines["CapEff"] == ["0" * 16]


async def test_stop_ends_all_also_what_does_not_want_to(tmp_path: Path) -> None:
    stubborn = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"]
    supervisor = Supervisor(tmp_path, {"PATH": os.environ["PATH"]}, replace(QUICK, grace=0.2))
    for name, argv in (("one", SLEEP), ("two", stubborn)):
        await supervisor.start(Program(name, argv))
    pids = supervisor.pids
    await supervisor.stop()
    assert [pid for pid in pids.values() if is_alive(pid)] == []
    assert list_programs(tmp_path) == {}


class TestSupervisorThatWasKilled:
    async def test_leaves_programs_that_the_next_one_takes_over(self, tmp_path: Path, leave_programs: Leave) -> None:
        left = leave_programs("one two")
        assert sorted(left) == ["one", "two"]
        supervisor = make(tmp_path)
        supervisor.find_left()
        for name in left:
            await supervisor.start(Program(name, SLEEP))
        assert supervisor.pids == left
        os.kill(left["one"], signal.SIGKILL)  # one that is not its child is looked after, too
        await until(lambda: supervisor.pids.get("one", left["one"]) != left["one"])
        assert supervisor.pids["two"] == left["two"]
        await supervisor.stop()
        assert list_programs(tmp_path) == {}

    async def test_leaves_programs_that_are_ended_when_they_are_other_ones_or_not_needed(
        self, tmp_path: Path, leave_programs: Leave
    ) -> None:
        left = leave_programs("one two")
        supervisor = make(tmp_path)
        supervisor.find_left()
        await supervisor.start(Program("one", [*SLEEP, "--other"]))
        await supervisor.end_left()
        assert list(supervisor.pids) == ["one"]
        assert supervisor.pids["one"] != left["one"]
        assert list_programs(tmp_path) == supervisor.pids
        await supervisor.stop()

    async def test_of_another_folder_is_left_alone(self, tmp_path: Path, leave_programs: Leave) -> None:
        left = leave_programs("one")
        (tmp_path / "other").mkdir()
        supervisor = make(tmp_path / "other")
        supervisor.find_left()
        await supervisor.start(Program("one", SLEEP))
        await supervisor.end_left()
        assert list_programs(tmp_path) == left
        await supervisor.stop()
        assert list_programs(tmp_path) == left


def test_a_program_whose_files_have_changed_is_another_one(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.write_text("first")
    program = Program("one", SLEEP, reads=(settings,))
    before = program.fingerprint
    assert program.fingerprint == before
    settings.write_text("second")
    assert program.fingerprint != before


def test_a_log_is_limited_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    with open(path, "ab", buffering=0) as program:  # has it open, as a program has
        program.write(b"a" * 600)
        limit_log(path, 1000)
        assert path.stat().st_size == 600
        program.write(b"b" * 600)
        limit_log(path, 1000)
        assert path.read_bytes() == b""
        program.write(b"c")
    assert path.read_bytes() == b"c"
    assert (tmp_path / "one.log.1").read_bytes() == b"a" * 400 + b"b" * 600


class TestLimits:
    @pytest.fixture
    def groups(self) -> Iterator[Groups]:
        if os.geteuid() != 0:
            pytest.skip("needs root: control groups")
        groups = Groups(f"k8e-test-{os.getpid()}")
        yield groups
        groups.remove()

    async def test_a_program_that_takes_too_much_memory_is_ended_and_started_again(
        self, tmp_path: Path, groups: Groups
    ) -> None:
        greedy = [sys.executable, "-c", "import time; time.sleep(0.5); b = bytearray(200 << 20); time.sleep(1000)"]
        supervisor = Supervisor(tmp_path, {"PATH": os.environ["PATH"]}, QUICK, groups)
        try:
            await supervisor.start(Program("greedy", greedy, limits=Limits(64 << 20)))
            first = supervisor.pids["greedy"]
            await until(lambda: supervisor.pids.get("greedy", first) != first)
        finally:
            await supervisor.stop()
        assert f"ended with {-signal.SIGKILL}" in (tmp_path / "supervisor.log").read_text()

    async def test_a_program_within_its_limits_runs(self, tmp_path: Path, groups: Groups) -> None:
        supervisor = Supervisor(tmp_path, {"PATH": os.environ["PATH"]}, QUICK, groups)
        try:
            await supervisor.start(Program("modest", SLEEP, limits=Limits(64 << 20)))
            text = await anyio.Path(f"/proc/{supervisor.pids['modest']}/cgroup").read_text()
            assert text.count(f"/k8e-test-{os.getpid()}/modest") >= 1
            assert not (tmp_path / "supervisor.log").exists()
        finally:
            await supervisor.stop()
