"""A daemon that hangs hangs no client: clients notice, say so and end; a command that is merely silent is not cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.agentkernel.house import AGENTKERNEL
from tests.cli.machine import K8E, Machine, make_folder, run_launcher, wait_until

PATIENCE = "0.6"  # of clients whose daemon never answers


@pytest.fixture
def quick(lone_machine: Machine) -> Machine:
    """Whose clients wait for a shorter time than people would."""
    lone_machine.overrides["K8E_PATIENCE"] = "3"
    return lone_machine


@contextlib.contextmanager
def stopped(daemon: subprocess.Popen[bytes]) -> Iterator[None]:
    daemon.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(daemon.pid))
    try:
        yield
    finally:
        daemon.send_signal(signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def clear_up(machine: Machine) -> None:
    for session in machine.live_sessions():
        machine.k8e("sandbox", "destroy", session)


@pytest.fixture(scope="module")
def hanging() -> Iterator[Machine]:
    """Whose daemon is stopped, for good."""
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        machine = Machine(folder, folder, {"K8E_PATIENCE": PATIENCE})
        with run_launcher(machine) as daemon, stopped(daemon):
            yield machine


class TestADaemonThatHangs:
    @pytest.mark.parametrize(
        "words",
        [
            ["sandbox", "status"],
            ["sandbox", "sessions"],
            ["sandbox", "create"],
            ["sandbox", "run", "true"],
            ["sandbox", "run", "true", "--raw"],
            ["sandbox", "run", "cat", "--raw", "--stdin"],
            ["sandbox", "write", "some-session", "/workspace/file"],
            ["sandbox", "approvals"],
            ["image", "list"],
        ],
        ids=" ".join,
    )
    def test_is_said_and_nothing_was_done(self, hanging: Machine, words: list[str]) -> None:
        done = hanging.k8e(*words, stdin=b"x" * 1_000_000)
        assert done.code == 2
        assert done.json["code"] == "daemon_silent"
        assert "nothing was done" in done.json["hint"]

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["sandbox", "list"], 2),
            (["daemon", "status"], 2),
            (["cp", __file__, "name:/workspace/x"], 2),
            (["run", "--image", "host", "--profile", "restrictive", "--", "true"], 125),
            (["exec", "name", "true"], 125),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_is_said_by_agentkernel(self, hanging: Machine, words: list[str], code: int) -> None:
        done = subprocess.run(
            [AGENTKERNEL, *words], env=hanging.env, capture_output=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, done
        assert b"[daemon_silent]" in done.stderr

    @pytest.mark.parametrize(
        "program", [(K8E, "sandbox-mcp"), (AGENTKERNEL, "mcp", "server")], ids=["k8e", "agentkernel"]
    )
    def test_ends_the_bridge_of_an_agent(self, hanging: Machine, program: tuple[object, ...]) -> None:
        words = [str(word) for word in program]
        with subprocess.Popen(
            words, env=hanging.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as bridge:
            assert bridge.stdin
            assert bridge.stderr
            bridge.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            bridge.stdin.flush()
            assert bridge.wait(60) != 0
            assert b'"daemon_silent"' in bridge.stderr.read()

    def test_does_not_run_later_what_was_given_up(self, quick: Machine) -> None:
        with run_launcher(quick) as daemon:
            session = quick.run("true").json["session_id"]
            with stopped(daemon):
                quick.overrides["K8E_PATIENCE"] = PATIENCE
                assert quick.run("touch ran").code == 2
                assert quick.run("touch ran", "--raw").code == 2
                assert quick.k8e("sandbox", "create").code == 2
            quick.overrides["K8E_PATIENCE"] = "30"
            done = quick.run("ls")
            assert (done.json["session_id"], done.json["stdout"]) == (session, "")
            assert quick.live_sessions() == [session]
            clear_up(quick)

    @pytest.mark.parametrize("raw", [[], ["--raw"]], ids=["whole", "raw"])
    def test_while_a_command_runs_is_no_reason_to_run_it_again(self, quick: Machine, raw: list[str]) -> None:
        with run_launcher(quick) as daemon:
            session = quick.run("true").json["session_id"]
            with quick.start("sandbox", "run", "touch ran; sleep 1000", "--timeout", "1000", *raw) as client:
                wait_until(lambda: quick.run("ls").json["stdout"] == "ran\n")
                with stopped(daemon):
                    assert client.wait(60) == 1
                    said, told = client.communicate()
                assert b'"daemon_silent"' in (told if raw else said)
                assert b"may have been done" in (told if raw else said)
            wait_until(lambda: not quick.running(session))
            clear_up(quick)

    def test_whose_queue_is_full_is_said_too(self, quick: Machine) -> None:
        path = quick.folder / "r" / "k8e.sock"
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as queue:
            listener.bind(str(path))
            listener.listen(0)
            while True:
                waiting = queue.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                try:
                    waiting.connect(str(path))
                except BlockingIOError:
                    break
            done = quick.k8e("sandbox", "sessions")
            assert (done.code, done.json["code"]) == (2, "daemon_silent")


def test_who_is_silent_is_not_cut(quick: Machine) -> None:
    """Commands that say nothing, or take nothing, for longer than clients wait before they ask; agents, too."""
    quick.overrides["K8E_PATIENCE"] = "6"
    script, size = "sleep 5; wc -c", 4_000_000
    with run_launcher(quick), contextlib.ExitStack() as stack:
        session = quick.run("true").json["session_id"]
        agent = stack.enter_context(quick.start("sandbox-mcp"))
        whole = stack.enter_context(quick.start("sandbox", "run", script))
        raw = stack.enter_context(quick.start("sandbox", "run", script, "--raw"))
        fed = stack.enter_context(quick.start("sandbox", "run", script, "--raw", "--stdin"))
        assert fed.communicate(bytes(size), timeout=60) == (b"%d\n" % size, b"")
        assert raw.communicate(timeout=60) == (b"0\n", b"")
        assert b'"exit_code": 0' in whole.communicate(timeout=60)[0]
        assert [whole.returncode, raw.returncode, fed.returncode] == [0, 0, 0]
        assert agent.stdin
        assert agent.stdout
        agent.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        agent.stdin.flush()
        assert b'"id":1' in agent.stdout.readline()
        agent.stdin.close()
        quick.k8e("sandbox", "destroy", session)


class TestADaemonThatIsKilled:
    @pytest.mark.parametrize("words", [[], ["--raw"], ["--raw", "--stdin"]], ids=" ".join)
    def test_while_a_command_runs_leaves_its_end_unknown(self, quick: Machine, words: list[str]) -> None:
        with run_launcher(quick) as daemon:
            quick.run("true")
            with quick.start("sandbox", "run", "touch ran; sleep 1000", "--timeout", "1000", *words) as client:
                wait_until(lambda: quick.run("ls").json["stdout"] == "ran\n")
                daemon.kill()
                daemon.wait()
                daemon.returncode = 0  # as expected
                said, told = client.communicate(timeout=60)
                assert client.returncode == 1
                assert b'"connection_lost"' in (told if words else said)
                assert b"may still be" in (told if words else said)
            with run_launcher(quick):
                clear_up(quick)
