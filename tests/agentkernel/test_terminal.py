"""A user types `agentkernel run`, `exec` or `attach` at a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.machine import AGENTKERNEL, PLAIN, Kernel
from tests.agentkernel.window import Window, open_window
from tests.cli.machine import DEADLINE, wait_until

RUN = (AGENTKERNEL, "run", *PLAIN)
TELL_SIZES = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", flush=True)
while signal.sigwait([signal.SIGWINCH]):
    os.write(1, b"%d %d\\n" % tuple(reversed(os.get_terminal_size(0))))
"""


@pytest.fixture
def shell(kernel: Kernel) -> Iterator[Window]:
    """In a sandbox, with job control."""
    with open_window(kernel, [*RUN, "bash", "--norc", "-i"]) as window:
        window.type(b"PS1=; stty -echo; echo rea''dy\n")
        window.wait_for(b"ready\r\n")
        yield window


class TestRun:
    def test_it_can_be_asked_for(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "-it", "sh", "-c", "tty; exit 6"]) as window:
            assert window.finish() == 6
            assert b"/dev/pts/" in window.screen

    def test_it_is_a_terminal_of_that_kind_and_size(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "sh", "-c", "tty; stty size; echo $TERM; echo err >&2; exit 5"]) as window:
            assert window.finish() == 5
            assert window.screen.partition(b"/dev/pts/")[2][1:] == b"\r\n33 101\r\nxterm-color\r\nerr\r\n"

    def test_without_one_on_both_sides_there_is_none(self, kernel: Kernel) -> None:
        with open_window(kernel, ["sh", "-c", f"{' '.join(map(str, RUN))} sh -c 'tty; tty <&1' | cat"]) as window:
            window.finish()
            assert window.screen == b"not a tty\r\n" * 2

    def test_it_is_resized_with_the_window(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "python3", "-c", TELL_SIZES]) as window:
            window.wait_for(b"ready\r\n")
            window.resize(50, 132)
            window.wait_for(b"50 132\r\n")
            window.resize(1, 2)
            window.wait_for(b"1 2\r\n")

    def test_ctrl_c_is_the_commands(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "sh", "-c", "echo ready; exec sleep 1000"]) as window:
            window.wait_for(b"ready\r\n")
            window.type(b"\x03")
            assert window.finish() == 130

    def test_ctrl_c_before_it_runs_ends_it_as_well(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "sleep", "1000"]) as window:
            # Not before the terminal is its own: no process would get the signal.
            name = Path(f"/proc/{window.process.pid}/cmdline")
            wait_until(lambda: not name.read_bytes().startswith(b"setsid"))
            window.type(b"\x03")
            # 1 is Python's own, interrupted while it imports `site`, before the first line of ours.
            assert window.finish() in (130, -signal.SIGINT, 1)
        wait_until(lambda: not kernel.live_sessions())

    def test_job_control(self, shell: Window) -> None:
        shell.type(b"sh -c 'echo job; sleep 1000'\n")
        shell.wait_for(b"job\r\n")
        shell.type(b"\x1a")
        shell.wait_for(b"Stopped")
        shell.type(b"jobs -s | grep -c job\n")
        shell.wait_for(b"1\r\n")
        shell.type(b"kill -9 %1; exit 3\nexit 3\n")
        assert shell.finish() == 3

    def test_ctrl_d_is_the_end_of_the_input(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "cat"]) as window:
            window.type(b"line\r")
            window.wait_for(b"line\r\nline\r\n")
            window.type(b"\x04")
            assert window.finish() == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_the_terminal_is_as_it_was_whatever_happens(self, kernel: Kernel, number: int) -> None:
        script = "trap 'exit 9' TERM HUP; stty raw; echo ready; sleep 1000 & wait"
        with open_window(kernel, [*RUN, "sh", "-c", script]) as window:
            before = window.mode
            window.wait_for(b"ready")
            wait_until(lambda: window.mode != before)
            window.process.send_signal(number)
            assert window.finish() == 9
            assert window.mode == before

    def test_a_window_that_is_closed_ends_what_does_not_listen(self, kernel: Kernel) -> None:
        keyboard, device = os.openpty()
        script = "trap '' HUP; echo ready; sleep 1000"
        words = ["setsid", "--ctty", *map(str, RUN), "sh", "-c", script]
        process = subprocess.Popen(words, stdin=device, stdout=device, stderr=device, env=kernel.env, cwd=kernel.home)
        os.close(device)
        seen = b""
        while b"ready" not in seen:
            seen += os.read(keyboard, 1000)
        os.close(keyboard)
        assert process.wait(DEADLINE) == -signal.SIGHUP
        wait_until(lambda: not kernel.live_sessions())

    def test_a_killed_client_leaves_nothing(self, kernel: Kernel) -> None:
        with open_window(kernel, [*RUN, "sh", "-c", "echo ready; sleep 1000"]) as window:
            window.wait_for(b"ready")
            window.process.kill()
        wait_until(lambda: not kernel.live_sessions())


class TestThere:
    """In a sandbox that is there already."""

    @pytest.fixture
    def name(self, kernel: Kernel) -> Iterator[str]:
        kernel.k8e("sandbox", "create", "--session-id", "box")
        yield "box"
        kernel.k8e("sandbox", "destroy", "box")

    def test_exec_is_exact_and_leaves_it_there(self, kernel: Kernel, name: str) -> None:
        script = 'cat; echo "$1" >&2; echo x > file; exit 6'
        done = kernel.call("exec", name, "sh", "-c", script, "sh", "a b", stdin=b"in\xff")
        assert (done.code, done.stdout, done.stderr) == (6, b"in\xff", b"a b\n")
        assert (
            kernel.call("exec", "--env", "A=1", "--workdir", "/tmp", name, "sh", "-c", "pwd; echo $A").stdout
            == b"/tmp\n1\n"
        )
        assert kernel.call("exec", name, "cat", "file").stdout == b"x\n"

    def test_exec_in_what_is_not_there(self, kernel: Kernel) -> None:
        done = kernel.call("exec", "nobody", "true")
        assert done.code == 125
        assert b"[session_not_found]" in done.stderr
        assert b"agentkernel sandbox list" in done.stderr
        for words in (("exec",), ("exec", "box"), ("attach",), ("attach", "a", "b"), ("exec", "../x", "true")):
            assert kernel.call(*words).code == 125

    def test_a_killed_client_ends_its_command_and_not_the_sandbox(self, kernel: Kernel, name: str) -> None:
        with open_window(kernel, [AGENTKERNEL, "exec", name, "sh", "-c", "echo ready; sleep 1000"]) as window:
            window.wait_for(b"ready")
            window.process.kill()
        wait_until(lambda: kernel.running(name) == [])
        assert kernel.call("exec", name, "true").code == 0

    def test_attach_is_a_shell_on_the_terminal(self, kernel: Kernel, name: str) -> None:
        with open_window(kernel, [AGENTKERNEL, "attach", name]) as window:
            window.type(b"stty size; echo $0; exit 4\n")
            window.wait_for(b"33 101\r\n")
            window.wait_for(b"bash\r\n")
            assert window.finish() == 4
        assert kernel.call("attach", name, stdin=b"echo from a pipe; exit 2\n").stdout == b"from a pipe\n"
        with open_window(kernel, [AGENTKERNEL, "attach", "--shell", "python3", name]) as window:
            window.wait_for(b">>> ")
            window.type(b"exit(8)\r")
            assert window.finish() == 8
