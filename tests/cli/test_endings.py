"""The command line gets a signal, or its reader leaves: the command in the sandbox ends too."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cli.machine import Machine, wait_until

# Children that would survive a careless end: their own sessions, deaf to TERM.
STUBBORN = "trap '' TERM HUP INT; setsid sleep 1000 & sleep 1000 & echo ready; wait; sleep 1000"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
class TestSignals:
    def test_end_a_streaming_run(self, machine: Machine, number: signal.Signals) -> None:
        with machine.start("sandbox", "run", "--raw", STUBBORN) as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            assert process.wait() == -number
            assert process.stderr.read() == b"", "no traceback"
        wait_until(lambda: machine.running(machine.session()) == [])

    def test_end_a_waiting_run(self, machine: Machine, number: signal.Signals) -> None:
        machine.run("true")
        with machine.start("sandbox", "run", STUBBORN) as process:
            wait_until(lambda: machine.running(machine.session()) != [])
            process.send_signal(number)
            assert process.wait() == -number
            assert process.stdout
            assert process.stdout.read() == b""
        wait_until(lambda: machine.running(machine.session()) == [])


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("TERM", 143)])
def test_a_shell_sees_128_and_the_number(machine: Machine, number: str, code: int) -> None:
    script = f"""
        set -m
        mkfifo pipe
        k8e sandbox run --raw 'echo ready; sleep 1000' > pipe &
        read word < pipe
        kill -{number} $!
        wait $!
        echo $?
    """
    assert machine.shell(script).stdout == f"{code}\n".encode()


def test_a_reader_that_has_enough_ends_the_command(machine: Machine) -> None:
    done = machine.shell("k8e sandbox run --raw yes | head -n 2; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == (b"y\ny\n141\n", b"")
    wait_until(lambda: machine.running(machine.session()) == [])


def test_a_json_reader_that_is_gone_is_no_traceback(machine: Machine) -> None:
    done = machine.shell("k8e sandbox run 'head -c 500000 /dev/zero' | true; echo ${PIPESTATUS[0]}")
    assert done.stderr == b""
    assert done.stdout in (b"141\n", b"0\n")


@pytest.mark.parametrize("words", ["", "--raw"])
def test_a_full_disk_is_said_on_what_is_left(machine: Machine, words: str) -> None:
    done = machine.shell(f"k8e sandbox run 'echo hi' {words} > /dev/full")
    assert (done.code, done.stdout, json.loads(done.stderr)["code"]) == (1, b"", "output_lost")


@pytest.mark.parametrize("words", ["", "--raw"])
def test_a_closed_output_is_no_success(machine: Machine, words: str) -> None:
    done = machine.shell(f"k8e sandbox run 'echo hi' {words} >&-")
    assert (done.code, done.stdout, json.loads(done.stderr)["code"]) == (1, b"", "output_lost")
    assert ">&-" in json.loads(done.stderr)["hint"]
    assert machine.shell(f"k8e sandbox run 'echo hi' {words} >&- 2>&-").code == 1
    assert machine.shell("k8e sandbox run --raw 'echo hi >&2' 2>&-").code == 1
    assert machine.shell("k8e sandbox run --raw true >&- 2>&-").code == 0


def test_a_terminal_that_does_not_block_loses_nothing(machine: Machine) -> None:
    import os

    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with machine.start("sandbox", "run", "--raw", "head -c 3000000 /dev/zero", stdout=theirs) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb") as reader:
            assert len(reader.read()) == 3_000_000
        assert process.wait() == 0
