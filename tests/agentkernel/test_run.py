"""`agentkernel run` as people and scripts use it: a command that might as well have been started here."""

from __future__ import annotations

import hashlib
import signal
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.agentkernel.machine import AGENTKERNEL, PLAIN, Kernel
from tests.cli.machine import run_launcher, wait_until
from tests.core.bare_engine import find_processes

TELL_ARGV = "import os, sys; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


class TestExact:
    @pytest.mark.parametrize("code", [0, 1, 2, 7, 124, 125, 255])
    def test_the_exit_code_is_the_commands_own(self, kernel: Kernel, code: int) -> None:
        done = kernel.run("sh", "-c", f"exit {code}")
        assert (done.code, done.stdout, done.stderr) == (code, b"", b"")

    def test_streams_are_separate_and_binary(self, kernel: Kernel) -> None:
        done = kernel.run("sh", "-c", r"printf 'out\0\377\r\n'; printf 'err\200' >&2; exit 3")
        assert (done.code, done.stdout, done.stderr) == (3, b"out\0\xff\r\n", b"err\x80")

    @given(words=st.lists(st.binary(max_size=40).filter(lambda word: b"\0" not in word), min_size=1, max_size=12))
    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_arguments_arrive_as_they_were_given(self, kernel: Kernel, words: list[bytes]) -> None:
        done = kernel.run("python3", "-c", TELL_ARGV, *words)
        assert (done.stdout.split(b"\0"), done.stderr, done.code) == (words, b"", 0)

    def test_arguments_that_look_like_something_else(self, kernel: Kernel) -> None:
        """The original's pool put them through a shell."""
        words = ["", " ", "--image", "-x", "--", "$HOME", "`id`", "$(id)", "a'b\"c", "\\", "a\nb", "*", "é", ";", "&&"]
        done = kernel.run("python3", "-c", TELL_ARGV, *words)
        assert done.stdout.decode().split("\0") == words

    def test_what_is_before_the_command_is_ours_and_what_is_after_it_is_not(self, kernel: Kernel) -> None:
        assert kernel.run("echo", "--help", "--profile", "nonsense").stdout == b"--help --profile nonsense\n"
        assert kernel.run("--", "echo", "--", "-h").stdout == b"-- -h\n"
        assert b"usage: agentkernel run" in kernel.call("run", "--help").stdout

    def test_a_long_command_line(self, kernel: Kernel) -> None:
        words = ["x" * 100_000, *map(str, range(5000))]
        done = kernel.run("python3", "-c", "import sys; print(len(sys.argv), len(sys.argv[1]))", *words)
        assert (done.stdout, done.stderr) == (b"5002 100000\n", b"")

    def test_output_comes_while_it_runs(self, kernel: Kernel) -> None:
        with kernel.starting("sh", "-c", "echo ready; read answer; echo got $answer >&2") as process:
            assert process.stdin
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == b"ready\n"
            process.stdin.write(b"it\n")
            process.stdin.flush()
            assert process.stderr.readline() == b"got it\n"
            assert process.wait() == 0

    def test_much_output_is_complete(self, kernel: Kernel) -> None:
        done = kernel.run("sh", "-c", "seq 1 2000000; seq 1 100000 >&2")
        expected = [b"".join(b"%d\n" % number for number in range(1, count + 1)) for count in (2_000_000, 100_000)]
        assert [done.stdout == expected[0], done.stderr == expected[1]] == [True, True]

    def test_it_starts_in_its_workspace_with_the_variables_it_was_given(self, kernel: Kernel) -> None:
        done = kernel.run("--env", "A=1=2", "--env=B=", "sh", "-c", "pwd; echo $A,$B,${HOME}", env={"SECRET": "x"})
        assert done.stdout == b"/workspace\n1=2,,/workspace\n"
        assert b"SECRET" not in kernel.run("env", env={"SECRET": "x"}).stdout


class TestInput:
    @pytest.mark.parametrize("content", [b"", b"line\n", bytes(range(256)) * 1000])
    def test_from_a_pipe(self, kernel: Kernel, content: bytes) -> None:
        assert kernel.run("cat", stdin=content).stdout == content

    def test_from_a_file_or_nothing_or_closed(self, kernel: Kernel) -> None:
        (kernel.home / "file").write_bytes(b"from a file")
        line = f"{AGENTKERNEL} run {' '.join(PLAIN)}"
        done = kernel.shell(f"{line} cat < file; {line} wc -c < /dev/null; {line} wc -c <&-; {line} true; echo $?")
        assert (done.stdout, done.stderr) == (b"from a file0\n0\n0\n", b"")

    def test_a_hundred_megabytes(self, kernel: Kernel) -> None:
        block = hashlib.sha256(b"block").digest() * 32768
        with kernel.starting("sha256sum") as process:
            assert process.stdin
            assert process.stdout
            for _ in range(100):
                process.stdin.write(block)
            process.stdin.close()
            assert process.stdout.read().split()[0].decode() == hashlib.sha256(block * 100).hexdigest()

    def test_that_nobody_reads_holds_nobody_up(self, kernel: Kernel) -> None:
        done = kernel.run("sh", "-c", "echo not interested; exit 4", stdin=bytes(5_000_000))
        assert (done.code, done.stdout, done.stderr) == (4, b"not interested\n", b"")


class TestEndings:
    def test_one_of_a_signal_is_128_and_its_number(self, kernel: Kernel) -> None:
        assert kernel.run("sh", "-c", "kill -9 $$").code == 137
        assert kernel.run("sh", "-c", "kill -SEGV $$").code == 139

    def test_a_timeout_is_124_and_there_is_none_unless_asked_for(self, kernel: Kernel) -> None:
        done = kernel.run("--timeout", "0.5", "sh", "-c", "trap '' TERM; echo begun; sleep 1000 & wait; sleep 1000")
        assert (done.code, done.stdout) == (124, b"begun\n")

    def test_what_is_not_there_or_no_program(self, kernel: Kernel) -> None:
        done = kernel.run("no-such-program")
        assert (done.code, done.stdout) == (127, b"")
        assert b"[program_not_found]" in done.stderr
        assert kernel.run("/etc/passwd").code == 126

    @pytest.mark.parametrize(
        "words",
        [
            ("--no-such-option", "true"),
            ("--timeout", "soon", "true"),
            ("--timeout=0", "true"),
            ("--keep=yes", "true"),
            ("--profile", "open", "true"),
            ("--image",),
            ("--image=", "true"),
            ("--json", "true"),
            ("--image", "-v/:/host", "true"),
            ("--image=-v/:/host", "true"),
            ("--env", "A", "true"),
            ("",),
        ],
    )
    def test_our_own_refusals_are_125_and_say_why_on_stderr(self, kernel: Kernel, words: tuple[str, ...]) -> None:
        done = kernel.call("run", "--no-network", *words)
        assert (done.code, done.stdout) == (125, b"")
        assert done.stderr.startswith(b"agentkernel: ")
        assert b"Traceback" not in done.stderr

    def test_an_image_that_was_asked_for_is_that_one_or_none(self, kernel: Kernel) -> None:
        done = kernel.call("run", "--no-network", "--image", "127.0.0.1:1/tools:1", "true")
        assert (done.code, done.stdout) == (125, b"")
        assert b"127.0.0.1:1" in done.stderr
        assert b"this machine's own tools" not in done.stderr

    def test_without_a_command(self, kernel: Kernel) -> None:
        assert kernel.call("run").code == 125

    def test_a_reader_that_has_enough_is_no_error(self, kernel: Kernel) -> None:
        line = f"{AGENTKERNEL} run {' '.join(PLAIN)}"
        done = kernel.shell(f"{line} yes | head -1; echo ${{PIPESTATUS[0]}}")
        assert (done.stdout, done.stderr) == (b"y\n141\n", b"")
        wait_for_nothing(kernel)

    def test_a_full_disk_is_no_exit_code_of_the_command(self, kernel: Kernel) -> None:
        line = f"{AGENTKERNEL} run {' '.join(PLAIN)}"
        done = kernel.shell(f"{line} echo hi > /dev/full")
        assert (done.code, b"[output_lost]" in done.stderr) == (125, True)
        assert kernel.shell(f"{line} sh -c 'echo hi >&2' 2> /dev/full").code == 125

    def test_nor_is_a_closed_output(self, kernel: Kernel) -> None:
        line = f"{AGENTKERNEL} run {' '.join(PLAIN)}"
        done = kernel.shell(f"{line} echo hi >&-")
        assert (done.code, b"[output_lost]" in done.stderr, b">&-" in done.stderr) == (125, True, True)
        assert kernel.shell(f"{line} sh -c 'echo hi >&2' 2>&-").code == 125
        assert kernel.shell(f"{line} sh -c 'exit 3' >&- 2>&-").code == 3

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
    def test_signals_are_passed_on(self, kernel: Kernel, number: int, code: int) -> None:
        with kernel.starting("sleep", "1000") as process:
            wait_until(lambda: commands(kernel) == ["sleep"])
            process.send_signal(number)
            assert (process.wait(), process.stderr.read() if process.stderr else b"") == (code, b"")

    def test_a_command_that_handles_a_signal_goes_on(self, kernel: Kernel) -> None:
        script = "trap 'echo heard' INT USR1; echo ready; while ! read -t 0.05 line; do :; done; exit 5"
        with kernel.starting("bash", "-c", script) as process:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"heard\n"
            for _ in range(2):
                process.send_signal(signal.SIGUSR1)
                assert process.stdout.readline() == b"heard\n"
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.wait() == 5

    def test_a_second_ctrl_c_ends_what_does_not_listen(self, kernel: Kernel) -> None:
        script = "trap 'echo no' INT; trap '' TERM; echo ready; while :; do sleep 1; done"
        with kernel.starting("sh", "-c", script) as process:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"no\n"
            process.send_signal(signal.SIGINT)
            assert process.wait() == -signal.SIGINT, "as a shell wants to see it"
        wait_for_nothing(kernel)


def commands(kernel: Kernel) -> list[str]:
    """The commands that run in sandboxes of this machine."""
    return [name for session in kernel.live_sessions() for name in kernel.running(session)]


def wait_for_nothing(kernel: Kernel) -> None:
    wait_until(lambda: not kernel.live_sessions() and not find_processes(f"{kernel.folder}/s/bare/"))


class TestNothingStays:
    def test_after_it_ended(self, kernel: Kernel) -> None:
        assert kernel.run("sh", "-c", "setsid sleep 1000 & echo > file").code == 0
        wait_for_nothing(kernel)

    @pytest.mark.parametrize("script", ["sleep 1000", "trap '' TERM HUP; setsid sleep 1000 & sleep 1000; sleep 1000"])
    def test_after_the_client_was_killed(self, kernel: Kernel, script: str) -> None:
        with kernel.starting("sh", "-c", f"echo ready; {script}") as process:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            process.kill()
        wait_for_nothing(kernel)

    def test_after_the_client_was_killed_at_any_moment(self, kernel: Kernel) -> None:
        for milliseconds in range(20, 120, 20):
            with kernel.starting("sleep", "1000") as process, pytest.raises(subprocess.TimeoutExpired):
                process.wait(milliseconds / 1000)
        wait_for_nothing(kernel)

    def test_after_the_daemon_was_killed(self, lone_kernel: Kernel) -> None:
        with run_launcher(lone_kernel) as daemon, lone_kernel.starting("sh", "-c", "echo ready; sleep 1000") as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == b"ready\n"
            daemon.kill()
            daemon.wait()
            assert process.wait() == 125
            assert b"[connection_lost]" in process.stderr.read()
            daemon.returncode = 0  # as expected
            assert find_processes(f"{lone_kernel.folder}/s/bare/"), "sandboxes outlive their daemon"
            with run_launcher(lone_kernel):
                wait_for_nothing(lone_kernel)

    def test_many_at_once_do_not_mix(self, kernel: Kernel) -> None:
        def start(number: int) -> subprocess.Popen[bytes]:
            words = [str(AGENTKERNEL), "run", *PLAIN, "sh", "-c", f"echo {number}; exit {number}"]
            return subprocess.Popen(words, stdout=subprocess.PIPE, env=kernel.env, cwd=kernel.home)

        processes = [start(number) for number in range(12)]
        for number, process in enumerate(processes):
            output, _ = process.communicate()
            assert (output, process.returncode) == (b"%d\n" % number, number)
        wait_for_nothing(kernel)


class TestKeep:
    def test_its_name_is_said_and_its_files_stay(self, kernel: Kernel) -> None:
        """The original keeps nothing."""
        done = kernel.run("--keep", "sh", "-c", "echo kept > file; echo out; exit 3")
        assert (done.code, done.stdout) == (3, b"out\n")
        name = find_name(done.stderr)
        try:
            assert f"agentkernel sandbox remove {name}".encode() in done.stderr
            assert kernel.call("exec", name, "cat", "file").stdout == b"kept\n"
            listed = kernel.call("sandbox", "list", "--json").json
            assert name in str(listed)
        finally:
            assert kernel.call("sandbox", "remove", name).code == 0
        assert kernel.live_sessions() == []

    def test_stop_keeps_the_files_and_start_brings_them_back(self, kernel: Kernel) -> None:
        """The original destroys them."""
        name = find_name(kernel.run("--keep", "sh", "-c", "echo kept > file").stderr)
        assert kernel.call("sandbox", "stop", name).code == 0
        done = kernel.call("exec", name, "cat", "file")
        assert (done.code, done.stdout) == (125, b"")
        assert b"[session_stopped]" in done.stderr
        assert f"hint: agentkernel sandbox start {name}".encode() in done.stderr
        assert kernel.call("sandbox", "start", name).code == 0
        assert kernel.call("exec", name, "cat", "file").stdout == b"kept\n"
        assert kernel.call("sandbox", "remove", name).code == 0

    def test_it_stays_when_the_client_is_killed_and_its_command_does_not(self, kernel: Kernel) -> None:
        with kernel.starting("--keep", "sh", "-c", "echo ready; sleep 1000") as process:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            (name,) = kernel.live_sessions()
            process.kill()
        wait_until(lambda: kernel.running(name) == [])
        assert kernel.call("sandbox", "remove", name).code == 0

    def test_what_never_ran_is_not_kept(self, kernel: Kernel) -> None:
        assert kernel.run("--keep", "no-such-program").code == 127
        wait_for_nothing(kernel)


def find_name(said: bytes) -> str:
    name = said.partition(b"kept as ")[2].partition(b":")[0].decode()
    assert name.startswith("run-"), said
    return name


class TestDryRun:
    def test_shows_what_would_be_and_makes_nothing(self, kernel: Kernel) -> None:
        done = kernel.run("--dry-run", "--json", "--profile", "restrictive", "python3")
        shown = done.json
        assert (shown["image"], shown["profile"], shown["read_only"], shown["allowed_hosts"]) == (
            "host",
            "restrictive",
            True,
            [],
        )
        assert b"profile:      moderate\n" in kernel.run("--dry-run", "true").stdout
        assert kernel.live_sessions() == []
