"""As an AI agent uses a virtual machine: the command line, and a daemon whose settings allow emulation, with the
machine's own /dev/kvm. What `run` promises of text, bytes and input is the same as ever (tests/cli/test_run.py)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli import test_run as usual
from tests.cli.machine import Machine, make_folder, run_launcher
from tests.engine.answers import plant_answers
from tests.engine.vm.conftest import on_its_day

pytestmark = [on_its_day(2), pytest.mark.timeout(1200)]
PATIENCE = 400.0  # of one command line: the first one waits until KVM and then emulation were tried
LIMITS = ("--cpus", "1", "--memory", "256m", "--disk", "256m")


@contextlib.contextmanager
def place_machine(guest: Path) -> Iterator[Machine]:
    with make_folder() as folder:
        settings = folder / "k8e.toml"
        settings.write_text("[pool]\nenabled = false\n[runtimes.kata]\nemulation = true\n")
        plant_answers(folder / "s", folder)
        yield Machine(folder, folder, {"K8E_TEST_GUEST": str(guest)}, deadline=PATIENCE)


def create(machine: Machine, *words: str) -> str:
    made = machine.k8e("sandbox", "create", "--runtime", "kata", *LIMITS, *words).json
    assert made["emulated"] is True, made
    return str(made["session_id"])


@pytest.fixture(scope="module")
def running(guest: Path) -> Iterator[tuple[Machine, str]]:
    """A machine with a daemon, and a session there."""
    with place_machine(guest) as machine, run_launcher(machine):
        session = create(machine)
        try:
            yield machine, session
        finally:
            machine.k8e("sandbox", "destroy", session)


@pytest.fixture
def machine(running: tuple[Machine, str], tmp_path: Path) -> Machine:
    """With a home of this test's own, for which the session is remembered."""
    machine, session = running
    own = Machine(machine.folder, tmp_path, machine.overrides, deadline=PATIENCE)
    own.state().parent.mkdir(parents=True)
    own.state().write_text(json.dumps({"session_id": session}))
    return own


class TestCode(usual.TestCode):
    pass


class TestBackground(usual.TestBackground):
    pass


class TestRaw(usual.TestRaw):
    def test_a_timeout_is_124(self, machine: Machine) -> None:
        done = machine.run("echo begun; sleep 1000", "--raw", "--timeout", "10")
        assert (done.code, done.stdout) == (124, b"begun\n")


def test_every_answer_says_that_it_is_emulated(machine: Machine) -> None:
    done = machine.run("echo out; echo err >&2; uname -n").json
    assert set(done) == usual.KEYS | {"emulated"}
    assert (done["stdout"], done["stderr"], done["emulated"]) == ("out\nsandbox\n", "err\n", True)
    shown = machine.k8e("sandbox", "get", machine.session()).json
    assert (shown["emulated"], shown["runtime"]) == (True, "kata")
    reports = {each["runtime"]: each for each in machine.k8e("sandbox", "status").json["runtimes"]}
    assert (reports["kata"]["available"], reports["kata"]["emulated"]) == (True, True)
    assert not reports["firecracker"]["available"]
    assert reports["firecracker"]["reason"]


def test_what_cannot_be_had_says_why(machine: Machine) -> None:
    done = machine.k8e("sandbox", "create", "--runtime", "firecracker")
    assert (done.code, done.json["code"]) == (1, "runtime_unavailable")
    assert done.json["detail"]
    assert done.json["hint"]
    done = machine.k8e("sandbox", "subagent", machine.session())
    assert (done.code, done.json["code"]) == (1, "sharing_refused")


def test_other_bytes_are_exact_in_both_directions(machine: Machine) -> None:
    content = os.urandom(3_000_000)
    done = machine.run("tee copy | sha256sum", "--stdin", stdin=content)
    assert done.json["stdout"].split()[0] == hashlib.sha256(content).hexdigest()
    assert machine.run("cat copy", "--raw").stdout == content
    assert machine.k8e("sandbox", "write", machine.session(), "put", stdin=content).code == 0
    assert machine.k8e("sandbox", "read", machine.session(), "put", "--raw").stdout == content


def test_a_flood_is_cut_and_counted(machine: Machine) -> None:
    code = "head -c 5000000 /dev/zero | tr '\\0' a; head -c 3000000 /dev/zero | tr '\\0' b >&2"
    done = machine.run(code, "--timeout", "5m").json
    assert (done["exit_code"], done["stdout_bytes"], done["stderr_bytes"]) == (0, 5_000_000, 3_000_000)
    assert done["truncated"] is True
    assert len(done["stdout"]) == len(done["stderr"]) == 1 << 20


def test_one_that_hangs_ends_in_time_with_all_that_it_began(machine: Machine) -> None:
    code = "trap '' TERM INT HUP; setsid sleep 1000 & echo begun; while :; do :; done"
    done = machine.run(code, "--timeout", "10")
    assert (done.code, done.json["status"], done.json["stdout"]) == (124, "timed_out", "begun\n")
    assert machine.running(machine.session()) == []
    assert machine.run("ps -eo comm | grep -cx sleep").json["stdout"] == "0\n"


def test_several_at_once(machine: Machine) -> None:
    """Each waits for all the others."""
    code = "touch here-%d; while [ $(ls here-* | wc -l) -lt 4 ]; do sleep 0.1; done; echo %d"
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda number: machine.run(code % (number, number), "--timeout", "5m"), range(4)))
    assert [each.json["stdout"] for each in done] == [f"{number}\n" for number in range(4)]


def test_too_much_memory_is_said_and_the_session_goes_on(machine: Machine) -> None:
    code = "x = [b'x' * (1 << 22) for _ in range(1 << 20)]"
    done = machine.run(code, "--lang", "python", "--timeout", "5m")
    assert (done.code, done.json["status"]) == (137, "oom_killed")
    assert machine.run("echo well").json["stdout"] == "well\n"


def test_the_least_memory_is_enough(machine: Machine) -> None:
    session = create(machine, "--memory", "128m")
    assert machine.run("echo well; python3 -c 'print(6 * 7)'", "--session-id", session).json["stdout"] == "well\n42\n"
    assert machine.k8e("sandbox", "destroy", session).code == 0
    done = machine.k8e("sandbox", "create", "--runtime", "kata", "--memory", "127m")
    assert (done.code, done.json["field"]) == (1, "limits.memory")


def test_it_outlives_its_daemon_and_its_files_a_stop(guest: Path) -> None:
    with place_machine(guest) as machine:
        with run_launcher(machine) as daemon:
            session = create(machine, "--persistent")
            words = ("--session-id", session)
            assert machine.run("mkfifo gate; echo kept > file", *words).code == 0
            later = machine.run("read x < gate; echo got $x", "--background", *words).json["run_id"]
            daemon.kill()
            assert daemon.wait() == -signal.SIGKILL
            daemon.returncode = 0
        with run_launcher(machine):
            assert machine.run("echo it > gate", *words).code == 0
            while (answer := machine.k8e("sandbox", "poll", later).json)["status"] == "running":
                pass
            assert (answer["status"], answer["stdout"], answer["emulated"]) == ("completed", "got it\n", True)
            assert machine.k8e("sandbox", "stop", session).code == 0
            assert machine.k8e("sandbox", "start", session).code == 0
            assert machine.run("cat file", *words).json["stdout"] == "kept\n"
            assert machine.k8e("sandbox", "destroy", session).code == 0
