"""`k8e sandbox run`: what goes in and what comes out, exactly."""

from __future__ import annotations

import base64
import hashlib

import pytest

from tests.cli.machine import Machine

KEYS = {
    "stdout",
    "stderr",
    "exit_code",
    "session_id",
    "run_id",
    "status",
    "duration_ms",
    "truncated",
    "stdout_bytes",
    "stderr_bytes",
    "denied",
}


class TestResult:
    def test_is_one_json_object(self, machine: Machine) -> None:
        done = machine.run("echo out; echo err >&2")
        assert set(done.json) == KEYS
        expected = {"stdout": "out\n", "stderr": "err\n", "exit_code": 0, "status": "completed", "truncated": False}
        assert done.json | expected == done.json
        assert (done.json["stdout_bytes"], done.json["stderr_bytes"]) == (4, 4)
        assert (done.code, done.json["session_id"]) == (0, machine.session())

    @pytest.mark.parametrize("code", [1, 2, 7, 124, 255])
    def test_the_exit_code_is_the_commands(self, machine: Machine, code: int) -> None:
        done = machine.run(f"exit {code}")
        assert (done.code, done.json["exit_code"]) == (code, code)

    def test_a_signal_is_128_and_its_number(self, machine: Machine) -> None:
        done = machine.run("kill -9 $$")
        assert (done.code, done.json["exit_code"], done.json["status"]) == (137, 137, "killed")

    def test_a_timeout_is_124_with_the_output_so_far(self, machine: Machine) -> None:
        done = machine.run("echo begun; sleep 1000", "--timeout", "0.5")
        assert (done.code, done.json["status"], done.json["stdout"]) == (124, "timed_out", "begun\n")
        assert machine.running(machine.session()) == []

    def test_other_bytes_are_readable_and_exact(self, machine: Machine) -> None:
        done = machine.run("printf 'a\\377'")
        assert done.json["stdout"] == "a\ufffd"
        assert base64.b64decode(done.json["stdout_base64"]) == b"a\xff"

    def test_text_is_text_in_any_locale(self, machine: Machine) -> None:
        for locale in ("C", "C.UTF-8", "POSIX"):
            done = machine.run("echo grüße 你好", env={"LC_ALL": locale})
            assert done.json["stdout"] == "grüße 你好\n"
            assert "grüße 你好".encode() in done.stdout

    def test_a_flood_is_cut_and_counted(self, machine: Machine) -> None:
        done = machine.run("head -c 5000000 /dev/zero | tr '\\0' a; head -c 3000000 /dev/zero | tr '\\0' b >&2")
        assert (done.json["stdout_bytes"], done.json["stderr_bytes"]) == (5_000_000, 3_000_000)
        assert done.json["truncated"] is True
        assert len(done.json["stdout"]) == len(done.json["stderr"]) == 1 << 20


class TestCode:
    @pytest.mark.parametrize(
        "text", ["it's", 'say "hi"', "a\\b", "$HOME `id`", "tab\there", "grüße", "two\nlines", "*", "'\"'\\'", "100%"]
    )
    def test_arrives_untouched(self, machine: Machine, text: str) -> None:
        code = f"import sys; sys.stdout.write({text!r})"
        assert machine.run(code, "--lang", "python").json["stdout"] == text
        assert machine.run("--lang=python", stdin=code.encode()).json["stdout"] == text

    def test_may_hold_bytes_that_are_no_text(self, machine: Machine) -> None:
        done = machine.run(b"printf %s '\xff\xfe' | od -An -tx1")
        assert done.json["stdout"] == " ff fe\n"
        done = machine.run(stdin=b"printf %s '\xff\xfe' | od -An -tx1")
        assert done.json["stdout"] == " ff fe\n"

    def test_may_be_empty(self, machine: Machine) -> None:
        assert machine.run("").json["exit_code"] == 0
        assert machine.run(stdin=b"").json["exit_code"] == 0

    def test_may_begin_with_a_dash(self, machine: Machine) -> None:
        done = machine.run("--lang", "python", "--", "-print(-1) if 0 else print(2)")
        assert done.json["stdout"] == "2\n"

    def test_may_be_longer_than_an_argument(self, machine: Machine) -> None:
        assert machine.run(stdin=b"#" * 200_000 + b"\necho done").json["stdout"] == "done\n"

    def test_with_a_nul_is_refused(self, machine: Machine) -> None:
        done = machine.run(stdin=b"echo \0")
        assert (done.code, done.json["field"]) == (1, "code")


class TestOptions:
    def test_env(self, machine: Machine) -> None:
        done = machine.run('printf %s "$A|$B"', "--env", "A=1=2 ", "--env", "B=", "--env=A=it's")
        assert done.json["stdout"] == "it's|"

    @pytest.mark.parametrize("assignment", ["A", "=1", ""])
    def test_env_that_is_none(self, machine: Machine, assignment: str) -> None:
        done = machine.run("true", f"--env={assignment}")
        assert (done.code, done.json["code"]) == (1, "usage")

    def test_a_bad_name_for_a_variable_is_the_services_to_refuse(self, machine: Machine) -> None:
        done = machine.run("true", "--env", "A-B=1")
        assert (done.code, done.json["code"], done.json["field"]) == (1, "invalid_argument", "env")

    def test_workdir(self, machine: Machine) -> None:
        assert machine.run("pwd").json["stdout"] == "/workspace\n"
        assert machine.run("pwd", "--workdir", "/tmp").json["stdout"] == "/tmp\n"
        done = machine.run("pwd", "--workdir", "/nope")
        assert (done.code, done.json["code"]) == (1, "workdir_not_found")

    @pytest.mark.parametrize(
        "words",
        [
            ["--lang", "rust", "x"],
            ["--timeout", "soon", "x"],
            ["--timeout", "nan", "x"],
            ["--timeout", "-1", "x"],
            ["--timeout", "0", "x"],
            ["x", "y"],
            ["--unknown", "x"],
            ["--raw=yes", "x"],
            ["--sess", "abc", "x"],
            ["x", "--background", "--raw"],
            ["--stdin"],
            ["x", "--session-id", "a", "--tenant", "b"],
            ["x", "--session-id", "a", "--git-repo", "b"],
            ["x", "--git-ref", "b"],
        ],
    )
    def test_nonsense_is_a_usage_error_and_not_unreachable(self, machine: Machine, words: list[str]) -> None:
        done = machine.run(*words)
        assert (done.code, done.json["code"]) == (1, "usage")
        assert not machine.state().exists(), "nothing was begun"


class TestStdin:
    def test_is_the_commands_when_asked_for(self, machine: Machine) -> None:
        assert machine.run("cat", "--stdin", stdin=b"in").json["stdout"] == "in"
        content = bytes(range(256)) * 10_000
        done = machine.run("sha256sum", "--stdin", stdin=content)
        assert done.json["stdout"].split()[0] == hashlib.sha256(content).hexdigest()

    def test_is_empty_otherwise(self, machine: Machine) -> None:
        assert machine.run("cat", stdin=b"not for you").json["stdout"] == ""

    def test_streams_with_raw(self, machine: Machine) -> None:
        content = bytes(range(256)) * 400_000  # more than fits into a message
        done = machine.run("sha256sum", "--stdin", "--raw", stdin=content)
        assert (done.code, done.stdout.split()[0].decode()) == (0, hashlib.sha256(content).hexdigest())

    def test_that_nobody_reads_hinders_nobody(self, machine: Machine) -> None:
        content = bytes(30 << 20)
        assert machine.run("exit 3", "--stdin", "--raw", stdin=content).code == 3
        assert machine.run("exit 3", "--stdin", stdin=content).code == 3

    def test_too_much_for_json_says_so(self, machine: Machine) -> None:
        done = machine.run("cat", "--stdin", stdin=bytes(50 << 20))
        assert (done.code, done.json["code"]) == (1, "message_too_large")

    def test_may_be_closed(self, machine: Machine) -> None:
        """Then the next descriptor opened is 0, and must not be taken for it."""
        run = "k8e sandbox run --raw"
        done = machine.shell(f"{run} cat --stdin <&-; {run} cat <&-; {run} <&-; {run} true <&- >&- 2>&-")
        assert (done.code, done.stdout, done.stderr) == (0, b"", b"")

    def test_is_live_with_raw(self, machine: Machine) -> None:
        with machine.start("sandbox", "run", "--raw", "--stdin", "while read x; do echo got $x; done") as process:
            assert process.stdin
            assert process.stdout
            for word in (b"one", b"two"):
                process.stdin.write(word + b"\n")
                process.stdin.flush()
                assert process.stdout.readline() == b"got " + word + b"\n"
            process.stdin.close()
            assert process.stdout.read() == b""
            assert process.wait() == 0


class TestRaw:
    def test_streams_are_byte_exact_and_apart(self, machine: Machine) -> None:
        done = machine.run("printf 'o\\0\\377'; printf 'e\\376' >&2; exit 5", "--raw")
        assert (done.code, done.stdout, done.stderr) == (5, b"o\0\xff", b"e\xfe")

    def test_nothing_is_cut(self, machine: Machine) -> None:
        done = machine.run("head -c 30000000 /dev/zero; head -c 5000000 /dev/zero >&2", "--raw")
        assert (done.code, len(done.stdout), len(done.stderr)) == (0, 30_000_000, 5_000_000)

    def test_output_comes_while_the_command_runs(self, machine: Machine) -> None:
        with machine.start("sandbox", "run", "--raw", "echo ready; sleep 1000") as process:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"

    def test_a_timeout_is_124(self, machine: Machine) -> None:
        done = machine.run("echo begun; sleep 1000", "--raw", "--timeout", "0.5")
        assert (done.code, done.stdout) == (124, b"begun\n")

    def test_errors_are_json_as_ever(self, machine: Machine) -> None:
        done = machine.run("true", "--raw", "--session-id", "nope")
        assert (done.code, done.json["code"]) == (1, "session_not_found")
        done = machine.run("true", "--raw", "--stdin", "--session-id", "nope")
        assert (done.code, done.json["code"]) == (1, "session_not_found")


class TestBackground:
    def test_gives_an_id_to_poll(self, machine: Machine) -> None:
        done = machine.run("read x < /workspace/fifo; echo $x", "--background")
        assert (done.code, done.json["status"], done.json["exit_code"]) == (0, "running", None)
        run = done.json["run_id"]
        assert machine.k8e("sandbox", "poll", run).json["status"] in ("running", "completed")

    def test_is_collected_when_it_has_ended(self, machine: Machine) -> None:
        machine.run("mkfifo gate")
        run = machine.run("read x < gate; echo got $x; exit 3", "--background").json["run_id"]
        answer = machine.k8e("sandbox", "poll", run)
        assert (answer.code, answer.json["status"]) == (0, "running")
        machine.run("echo it > gate")
        while (answer := machine.k8e("sandbox", "poll", run)).json["status"] == "running":
            pass
        assert (answer.json["status"], answer.json["exit_code"], answer.json["stdout"]) == ("completed", 3, "got it\n")
        assert answer.code == 0, "poll itself went well"

    def test_can_be_killed(self, machine: Machine) -> None:
        run = machine.run("sleep 1000", "--background").json["run_id"]
        assert machine.k8e("sandbox", "kill", run).json == {"ok": True, "had_ended": False}
        while (answer := machine.k8e("sandbox", "poll", run)).json["status"] == "running":
            pass
        assert answer.json["status"] == "killed"
        assert machine.running(machine.session()) == []
        assert machine.k8e("sandbox", "kill", run).json == {"ok": True, "had_ended": True}

    @pytest.mark.parametrize("polled", [True, False])
    def test_that_ended_by_itself_is_said_to_have_ended(self, machine: Machine, polled: bool) -> None:
        run = machine.run("true", "--background").json["run_id"]
        if polled:
            while machine.k8e("sandbox", "poll", run).json["status"] == "running":
                pass
        else:
            while machine.running(machine.session()):
                pass
        assert machine.k8e("sandbox", "kill", run).json == {"ok": True, "had_ended": True}
        assert machine.k8e("sandbox", "poll", run).json["status"] == "completed"
        foreground = machine.run("true").json["run_id"]
        assert machine.k8e("sandbox", "kill", foreground).json == {"ok": True, "had_ended": True}
