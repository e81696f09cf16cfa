"""The agent as PID 1: it costs next to nothing, reaps everybody, and nothing inside can stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from devel.sandboxes import AGENT, Variation, launch_bare
from k8e.conformance.counters import WRITE_COUNTERS
from k8e.conformance.subject import Subject, command, complete, finish, prepare, python, run, run_python
from k8e.link.errors import AgentError, Code, LinkError, NotStarted, Stage
from k8e.link.model import AGENT as ROOT
from k8e.link.model import Identity
from tests.sandboxes import KINDS, USER, Linked, needs_root, open_sandbox

pytestmark = needs_root
IDLE_KIB = 256


@pytest.fixture(params=KINDS)
async def linked(request: pytest.FixtureRequest) -> AsyncIterator[Linked]:
    async with open_sandbox(request.param) as linked:
        yield linked


@pytest.fixture
async def bare() -> AsyncIterator[Linked]:
    async with open_sandbox("bare") as linked:
        yield linked


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settles(measure_pid: int, limit: int = IDLE_KIB) -> None:
    """The agent gives memory back when it has been idle for a while; it must get there, and stay alive meanwhile."""
    async with asyncio.timeout(15):
        while resident_kib(measure_pid) > limit:
            await asyncio.sleep(0.1)


class TestCost:
    async def test_idle_it_takes_at_most_256_kib(self, bare: Linked) -> None:
        await settles(bare.launched.agent_pid)

    async def test_after_much_work_it_takes_no_more(self, bare: Linked) -> None:
        subject = await bare.subject("work")
        for _ in range(3):
            await asyncio.gather(
                *(complete(subject, python(subject, WRITE_COUNTERS, str(4 << 20), window=1 << 20)) for _ in range(20))
            )
        await bare.link.write_file(subject.inside(b"file"), b"x" * (32 << 20))
        assert len(await bare.link.read_file(subject.inside(b"file"))) == 32 << 20
        await bare.link.list_dir(b"/usr/share", recursive=True)
        await settles(bare.launched.agent_pid)
        assert (await run(subject, "echo", "alive")).stdout == b"alive\n"

    async def test_idle_for_a_while_it_still_answers(self, linked: Linked) -> None:
        subject = await linked.subject("idle")
        for _ in range(2):
            assert (await run(subject, "echo", "alive")).stdout == b"alive\n"
            await asyncio.sleep(2.5)  # longer than it waits before it gives its memory back
        assert (await run(subject, "echo", "alive")).stdout == b"alive\n"

    async def test_it_keeps_no_descriptor_of_what_is_over(self, bare: Linked) -> None:
        subject = await bare.subject("many")
        path = subject.inside(b"file")
        await run(subject, "true")
        before = descriptors(bare.launched.agent_pid)
        for number in range(1000):
            await run(subject, "true", stdin=bool(number % 2))
        for _ in range(100):
            await bare.link.write_file(path, b"x")
            await bare.link.read_file(path)
            await bare.link.list_dir(subject.directory)
            await (await bare.link.watch(path)).close()
            with pytest.raises(NotStarted):
                await run(subject, "/no/such/program")
        async with asyncio.timeout(10):
            while descriptors(bare.launched.agent_pid) > before:
                await asyncio.sleep(0.05)

    async def test_output_that_nobody_reads_takes_no_more_than_its_windows(self, bare: Linked) -> None:
        subject = await bare.subject("unread")
        processes = [await bare.link.start(command(subject, "yes", window=64 << 10)) for _ in range(20)]
        for _ in range(20):
            await run(subject, "true")
        assert resident_kib(bare.launched.agent_pid) < 20 * 64 + 1024
        for process in processes:
            await process.end(grace=0)
            process.discard()
            await process.wait()


class TestReaping:
    async def test_orphans_become_no_zombies(self, linked: Linked) -> None:
        code = """
import os
for _ in range(200):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        os._exit(0)
    os.wait()
"""
        subject = await linked.subject("orphans")
        done = await run_python(subject, code)
        assert done.outcome.exit_code == 0
        await linked.clean(subject)

    async def test_orphans_that_die_after_their_command_are_reaped_too(self, linked: Linked) -> None:
        subject = await linked.subject("later")
        script = "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3 & done"
        for _ in range(10):
            assert (await run(subject, "sh", "-c", script)).outcome.exit_code == 0
        await linked.clean(subject)


# Argument: signals to leave out.
SIGNAL_PID1 = """
import os, sys
for number in {*range(65)} - {*map(int, sys.argv[1:])}:
    try:
        os.kill(1, number)
    except OSError as error:
        print(error.errno)
"""


class TestSignals:
    async def test_from_the_user_are_refused(self, linked: Linked) -> None:
        subject = await linked.subject("signals")
        done = await run_python(subject, SIGNAL_PID1)
        assert set(done.stdout.split()) == {b"1"}  # EPERM
        assert len(done.stdout.split()) == 65

    @pytest.mark.parametrize("capabilities", [False, True])
    async def test_from_root_inside_change_nothing(self, linked: Linked, capabilities: bool) -> None:
        subject = await linked.subject("signals")
        held = await linked.link.start(command(subject, "cat"))
        # gVisor does not shield PID 1 from the two that nobody can block; root there can end its own sandbox.
        unstoppable = ["9", "19"] if linked.launched.kind == "gvisor" else []
        if capabilities:
            await linked.run_as_root("python3", "-S", "-E", "-c", SIGNAL_PID1, *unstoppable)
        else:
            await run_python(subject, SIGNAL_PID1, *unstoppable, identity=ROOT)
        assert (await run(subject, "echo", "alive")).stdout == b"alive\n"
        assert (await finish(held, b"still here")).stdout == b"still here"

    async def test_term_from_outside_ends_everything_in_good_order(self) -> None:
        async with open_sandbox("bare") as linked:
            launched = linked.launched
            subject = await linked.subject("end")
            await linked.link.start(command(subject, "sleep", "1000"))
            os.kill(launched.agent_pid, signal.SIGTERM)
            assert await asyncio.to_thread(launched.runtime.wait, 10) == 0
            assert not launched.socket.exists()
            with pytest.raises(LinkError):
                await linked.link.commands()


class TestSecrets:
    """What belongs to the agent is out of reach, also for root without capabilities, which is all that commands get."""

    PEEK = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, action):
    try:
        action()
        print("got", name)
    except OSError as error:
        print("denied", name)
def read(path):
    def action():
        with open(path, "rb") as file:
            if not file.read(16):
                raise OSError("nothing there")
    return action
def ptrace(request):
    def action():
        if libc.ptrace(request, pid, 0, 0) < 0:
            raise OSError(ctypes.get_errno())
    return action
for pid in (1, os.getppid()):
    for name in sys.argv[1:]:
        attempt(name, read(f"/proc/{pid}/{name}"))
        attempt(name, lambda: os.open(f"/proc/{pid}/{name}", os.O_RDWR))
    attempt("attach", ptrace(16))
    attempt("seize", ptrace(0x4206))
"""

    @pytest.mark.parametrize("who", [USER, ROOT], ids=["user", "root"])
    async def test_memory_and_descriptors_cannot_be_read(self, linked: Linked, who: Identity) -> None:
        subject = await linked.subject("peek")
        names = ["mem", "syscall", "stack"]
        # gVisor shows these two to everybody (the agent has no environment), and root's descriptors to root.
        if linked.launched.kind != "gvisor":
            names += ["environ", "auxv"]
        if linked.launched.kind != "gvisor" or who is USER:
            names += [f"fd/{number}" for number in range(3, 12)]
        done = await run_python(subject, self.PEEK, *names, identity=who)
        assert done.outcome.exit_code == 0, done
        got = [line for line in done.stdout.splitlines() if not line.startswith(b"denied")]
        assert got == [], done.stdout

    async def test_the_socket_is_out_of_reach_for_the_user(self, linked: Linked) -> None:
        code = """
import os, socket
for attempt in (lambda: os.listdir("/run/k8e"), lambda: socket.socket(socket.AF_UNIX).connect("/run/k8e/agent.sock")):
    try:
        print("got", attempt())
    except PermissionError:
        print("denied")
"""
        subject = await linked.subject("socket")
        assert (await run_python(subject, code)).stdout == b"denied\ndenied\n"

    async def test_an_inherited_listener_is_nowhere_inside(self) -> None:
        async with open_sandbox("bare", Variation(inherit_listener=True)) as linked:
            subject = await linked.subject("inherited")
            assert (await run(subject, "sh", "-c", "exit 7")).outcome.exit_code == 7
            done = await run(subject, "find", "/", "-xdev", "-type", "s", identity=ROOT)
            assert done.stdout == b""


class TestSupervisors:
    """Each command has a small parent of its own. Killing it gains nothing and hurts only oneself."""

    KILL_PARENT = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)"

    async def test_the_user_cannot_kill_it(self, linked: Linked) -> None:
        subject = await linked.subject("parent")
        done = await run_python(subject, self.KILL_PARENT)
        assert done.outcome.exit_code == 1
        assert b"PermissionError" in done.stderr

    async def test_root_that_kills_it_is_told_that_the_command_is_lost(self, linked: Linked) -> None:
        subject = await linked.subject("parent")
        other = await linked.link.start(command(subject, "cat"))
        with pytest.raises(AgentError) as caught:
            await run_python(subject, self.KILL_PARENT, identity=ROOT)
        assert caught.value.code is Code.LOST
        assert (await finish(other, b"others live on")).stdout == b"others live on"
        assert (await run(subject, "echo", "alive")).stdout == b"alive\n"

    async def test_root_that_kills_all_of_them_leaves_a_working_agent(self, linked: Linked) -> None:
        subject = await linked.subject("parents")
        for _ in range(3):
            with pytest.raises(AgentError) as caught:
                await run_python(subject, "import os, signal; os.kill(-1, signal.SIGKILL)", identity=ROOT)
            assert caught.value.code is Code.LOST
            assert (await run(subject, "echo", "alive")).stdout == b"alive\n"


class TestSurroundings:
    async def test_it_also_works_when_it_is_not_pid_1(self) -> None:
        # bwrap's own little init is PID 1 then, and the agent becomes a subreaper.
        variation = Variation(as_pid_1=False)
        async with open_sandbox("bare", variation) as linked:
            subject = await linked.subject("not-pid-1")
            script = "setsid sh -c 'sleep 1000 & sleep 1000' & echo started; sleep 1000"
            process = await linked.link.start(command(subject, "sh", "-c", script))
            assert await process.stdout.read() == b"started\n"
            await process.end(grace=0.2)
            assert (await finish(process)).outcome.signal == signal.SIGTERM
            assert b"sleep" not in await prepare(subject, "sh", "-c", "cat /proc/[0-9]*/comm")

    async def test_a_uid_that_the_namespace_does_not_have_is_not_started(self) -> None:
        variation = Variation(bwrap=("--unshare-user", "--uid", "0", "--gid", "0"))
        async with open_sandbox("bare", variation) as linked:
            subject = Subject(sandbox=linked.link, directory=b"/tmp", user=USER)
            with pytest.raises(NotStarted) as caught:
                await run(subject, "true", identity=Identity(uid=12_345))
            assert (caught.value.stage, caught.value.code) == (Stage.USER, Code.INVALID)
            assert (await run(subject, "id", "-u", identity=ROOT)).stdout == b"0\n"

    async def test_without_a_right_to_change_users_it_runs_commands_as_itself_and_no_other(self) -> None:
        """A pod, where nothing may be root."""
        alone = ("--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL")
        async with open_sandbox("bare", Variation(bwrap=alone, inherit_listener=True)) as linked:
            subject = Subject(sandbox=linked.link, directory=b"/tmp", user=Identity(1000, 1000))
            assert (await run(subject, "sh", "-c", "id -u; id -g")).stdout == b"1000\n1000\n"
            for other in (Identity(0, 0), Identity(1001, 1000), Identity(1000, 1001), Identity(1000, 1000, (5,))):
                with pytest.raises(NotStarted) as caught:
                    await run(subject, "true", identity=other)
                assert caught.value.stage is Stage.USER

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--listen", "/tmp/nowhere/agent.sock"],
            ["--instance", "00" * 16],
            ["--listen", "relative", "--instance", "00" * 16],
            ["--fd", "0", "--instance", "00" * 16],
            ["--fd", "99", "--instance", "00" * 16],
            ["--fd", "x", "--instance", "00" * 16],
            ["--fd", "3", "--listen", "/run/x/agent.sock", "--instance", "00" * 16],
            ["--listen", "/run/x/agent.sock", "--instance", "zz" * 16],
            ["--listen", "/run/x/agent.sock", "--instance", "00"],
            ["--unknown"],
        ],
        ids=" ".join,
    )
    def test_wrong_arguments_are_refused_with_a_word(self, arguments: list[str]) -> None:
        done = subprocess.run([AGENT, *arguments], capture_output=True, timeout=10)
        assert done.returncode == 70
        assert done.stderr.startswith(b"k8e-agent: ")
        assert done.stdout == b""

    def test_a_directory_that_others_can_enter_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "open"
        folder.mkdir(mode=0o755)
        done = subprocess.run(
            [AGENT, "--listen", str(folder / "s"), "--instance", "00" * 16], capture_output=True, timeout=10
        )
        assert done.returncode == 70
        assert b"0700" in done.stderr

    def test_nothing_is_left_of_a_sandbox_that_was_closed(self) -> None:
        with launch_bare() as launched:
            namespace = os.readlink(f"/proc/{launched.agent_pid}/ns/pid")
            assert namespace in namespaces()
        assert namespace not in namespaces()
        assert not launched.socket.parent.parent.exists()


def namespaces() -> set[str]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/pid"))
        except OSError:
            continue  # gone meanwhile, or not ours to look at
    return found
