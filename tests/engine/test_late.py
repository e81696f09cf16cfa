"""Late arrivals: a tool whose daemon is dead already, a runtime that joins a group that is being removed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.system.tool import bound_to, run_tool
from k8e.engine.tasks import finish_in_thread
from tests.engine.rig import Rig
from tests.engine.traces import CGROUPS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the local engine needs root")


def all_groups(name: str) -> list[Path]:
    """Where it is or would be, in every hierarchy."""
    tops = [path for path in (CGROUPS, *CGROUPS.iterdir()) if (path / "cgroup.procs").exists()]
    return [top / name for top in tops if not (top.parent / "cgroup.controllers").exists()]


@pytest.fixture
def group() -> Iterator[Cgroups]:
    cgroups = Cgroups(f"k8e-test-{secrets.token_hex(4)}")
    for path in all_groups(cgroups.name):
        for one in (path, path / "box"):
            one.mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                # Version 1: no process can join a group that has no processor.
                if (path.parent / file).exists() and not (path.parent / "cgroup.controllers").exists():
                    (one / file).write_text((path.parent / file).read_text())
    yield cgroups
    cgroups.kill("box")
    cgroups.remove("box")
    cgroups.remove_all()
    assert not [path for path in all_groups(cgroups.name) if path.exists()]


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def join(cgroups: Cgroups, pid: int) -> None:
    for path in all_groups(cgroups.name):
        (path / "box" / "cgroup.procs").write_text(str(pid))


class TestGroups:
    def test_one_with_somebody_in_it_is_emptied_and_removed(self, group: Cgroups) -> None:
        """As when a runtime that was told to die arrives after all others had been killed."""
        assert group.processes("box") == set()
        with sleeper() as late:
            join(group, late.pid)
            group.remove("box")
            assert late.wait() == -9
        assert group.sandboxes() == set()

    def test_those_who_join_one_after_the_other_are_outlasted(self, group: Cgroups) -> None:
        """Each as soon as the one before is dead, as long as there is a group to join."""
        joining = "; ".join(f"echo $$ > {path}/box/cgroup.procs || exit" for path in all_groups(group.name))
        script = f"for number in $(seq 20); do sh -c '{joining}; echo; exec sleep 1000'; done 2>/dev/null"
        with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as crowd:
            assert crowd.stdout
            crowd.stdout.readline()
            group.remove("box")
            crowd.wait()
        assert group.sandboxes() == set()

    def test_groups_below_go_too(self, group: Cgroups) -> None:
        for path in all_groups(group.name):
            (path / "box" / "inner").mkdir()
        group.remove("box")
        assert group.sandboxes() == set()

    def test_somebody_who_cannot_be_killed_ends_the_patience(
        self, group: Cgroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with sleeper() as late:
            join(group, late.pid)
            monkeypatch.setattr(Cgroups, "processes", lambda *_: set())  # no process to be seen, and yet busy
            with pytest.raises(EngineError, match="still in use"):
                group.remove("box", deadline=0.1)
            monkeypatch.undo()


async def test_a_runtime_that_joins_while_a_sandbox_is_destroyed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    late: list[subprocess.Popen[bytes]] = []
    kill = Cgroups.kill

    def kill_and_meet_another(cgroups: Cgroups, sandbox: str, deadline: float = 30.0) -> None:
        kill(cgroups, sandbox, deadline)
        late.append(subprocess.Popen(["sleep", "1000"]))
        for path in rig.cgroups(sandbox):
            (path / "cgroup.procs").write_text(str(late[-1].pid))

    monkeypatch.setattr(Cgroups, "kill", kill_and_meet_another)
    await rig.engine.destroy(name)
    assert [process.wait() for process in late] == [-9]
    assert not rig.cgroups(name)


class TestTools:
    async def test_work_that_fails_after_it_was_given_up_is_nobodys_error(self) -> None:
        begun, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def fail() -> None:
            loop.call_soon_threadsafe(begun.set)
            go.wait(60)
            raise EngineError("work", "failed")

        unheard: list[object] = []
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        task = asyncio.create_task(finish_in_thread(fail))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait({task})
        assert task.cancelled()
        del task
        await asyncio.sleep(0)
        gc.collect()
        loop.set_exception_handler(None)
        assert unheard == []

    async def test_run_as_they_were_given(self) -> None:
        words = ("printf", "%s|", "a b", "$HOME", "'", '"', "\\", "", "-x")
        assert await run_tool(*words, capture=True) == "a b|$HOME|'|\"|\\||-x|"

    async def test_end_with_their_own_status(self) -> None:
        with pytest.raises(EngineError, match="exit status 7"):
            await run_tool("sh", "-c", "exit 7")
        with pytest.raises(EngineError, match="oh no"):
            await run_tool("sh", "-c", "echo oh no >&2; exit 1")

    def test_of_a_parent_that_died_before_they_began_do_nothing(self, tmp_path: Path) -> None:
        """The child is held until its parent is dead, and only then becomes the tool."""
        code = """
import os, sys, time
from k8e.engine.local.system.tool import bound_to
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.001)
    command = bound_to(parent, ["touch", sys.argv[1]])
    os.execvp(command[0], command)
os._exit(0)
"""
        # Its end is the end of the pipe, which the tool holds as well.
        subprocess.run([sys.executable, "-c", code, tmp_path / "made"], check=True, stdout=subprocess.PIPE)
        assert not (tmp_path / "made").exists()

    def test_of_a_living_parent_do_what_they_should(self, tmp_path: Path) -> None:
        subprocess.run(bound_to(os.getpid(), ["touch", str(tmp_path / "made")]), check=True)
        assert (tmp_path / "made").exists()

    def test_die_with_their_parent(self, tmp_path: Path) -> None:
        code = """
import asyncio, sys
from k8e.engine.local.system.tool import try_runtime
asyncio.run(try_runtime("sh", "-c", "echo begun; exec sleep 1000", deadline=60))
"""
        os.mkfifo(tmp_path / "said")
        code = code.replace("echo begun", f"echo begun > {tmp_path}/said")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
            assert (tmp_path / "said").read_text() == "begun\n"
            threads = Path(f"/proc/{parent.pid}/task").iterdir()
            children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
            handles = [os.pidfd_open(int(pid)) for pid in children]
            assert handles
            parent.kill()
        for handle in handles:
            _wait_for_end(handle)


def _wait_for_end(handle: int) -> None:
    import select

    assert select.select([handle], [], [], 60)[0]
    os.close(handle)


async def test_many_tools_of_a_killed_parent_make_nothing_afterwards(tmp_path: Path) -> None:
    """Killed at random while it starts tool after tool: when it and its children are gone, nothing changes any more."""
    code = """
import asyncio, itertools, sys
from k8e.engine.local.system.tool import try_tool
async def work():
    for number in itertools.count():
        await asyncio.gather(*(try_tool("touch", f"{sys.argv[1]}/{number}-{one}") for one in range(4)))
asyncio.run(work())
"""
    for turn in range(8):
        folder = tmp_path / str(turn)
        folder.mkdir()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, folder)
        while not any(folder.iterdir()):
            await asyncio.sleep(0.001 * turn)
        process.kill()
        await process.wait()
        while b"touch" in await asyncio.to_thread(_commands_about, folder):
            await asyncio.sleep(0.01)
        before = sorted(folder.iterdir())
        await asyncio.sleep(0.05)
        assert sorted(folder.iterdir()) == before


def _commands_about(folder: Path) -> bytes:
    found = b""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in words:
                found += words
    return found


class TestOpenFiles:
    def test_a_group_that_was_made_again_is_another_one(self, group: Cgroups) -> None:
        """Commands read a group's files through descriptors that stay open."""
        assert not group.alive("box")
        with sleeper() as first:
            join(group, first.pid)
            assert group.alive("box")
            group.remove("box")
        assert not group.alive("box")
        assert group.oom_kills("box") == 0
        for path in all_groups(group.name):
            (path / "box").mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (path / file).exists() and not (path.parent / "cgroup.controllers").exists():
                    (path / "box" / file).write_text((path / file).read_text())
        assert not group.alive("box")
        with sleeper() as second:
            join(group, second.pid)
            assert group.alive("box")

    def test_no_more_stay_open_than_that(self, group: Cgroups) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(300):
            for path in all_groups(group.name):
                (path / f"box-{number}").mkdir()
        try:
            assert not any(group.alive(f"box-{number}") for number in range(300))
            assert not any(group.oom_kills(f"box-{number}") for number in range(300))
            assert len(os.listdir("/proc/self/fd")) - before == 256
            group.let_go("box-299")
            assert len(os.listdir("/proc/self/fd")) - before in (254, 255)
        finally:
            group.close()
            for number in range(300):
                group.remove(f"box-{number}")
        assert len(os.listdir("/proc/self/fd")) == before
