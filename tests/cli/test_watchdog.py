"""A loop that no longer turns: noticed, explained, ended; sandboxes live on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.daemon.server import LogFile
from tests.cli.machine import DEADLINE, ROOT, Machine, run_launcher, wait_until
from tests.cli.stuck_launcher import HANG, HOLD, SHORTLY


@contextlib.contextmanager
def stuck_launcher(machine: Machine, *, margin: int = 60, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ended when this ends, if it does not do so itself."""
    ours, theirs = os.pipe()
    with open(machine.folder / "log", "ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.stuck_launcher", str(theirs), str(margin)],
            cwd=ROOT,
            env={**os.environ, **machine.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    with os.fdopen(ours, "rb") as ready:
        assert ready.read() == b"ready\n", (machine.folder / "log").read_text()
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGCONT)
        daemon.terminate()
        daemon.wait(DEADLINE)


def read_log(machine: Machine) -> str:
    return (machine.folder / "s" / "daemon.log").read_text()


@pytest.mark.parametrize(
    ("number", "place", "words"),
    [(HANG, "hang_for_good", "loop_dead"), (HOLD, "hold_the_interpreter", "Timeout (")],
    ids=["waits", "holds the interpreter"],
)
def test_a_loop_that_hangs_is_explained_and_ended(lone_machine: Machine, number: int, place: str, words: str) -> None:
    machine = lone_machine
    with stuck_launcher(machine, margin=2) as daemon:
        session = machine.run("true").json["session_id"]
        with machine.start("sandbox", "run", "echo kept > file; sleep 1000", "--timeout", "1000") as client:
            wait_until(lambda: machine.run("ls").json["stdout"] == "file\n")
            daemon.send_signal(number)
            assert daemon.wait(DEADLINE) == 1
            said, _ = client.communicate(timeout=DEADLINE)
            assert (client.returncode, b'"connection_lost"' in said) == (1, True)
        log = read_log(machine)
        assert words in log
        assert f"in {place}" in log, "where it hung"
    with run_launcher(machine):
        assert machine.run("cat file", "--session-id", session).json["stdout"] == "kept\n"
        machine.k8e("sandbox", "destroy", session)


def test_one_that_hangs_shortly_is_said_and_goes_on(lone_machine: Machine) -> None:
    machine = lone_machine
    with stuck_launcher(machine) as daemon:
        daemon.send_signal(SHORTLY)
        assert machine.k8e("sandbox", "sessions").json == {"sessions": []}
        wait_until(lambda: "in hang_shortly" in read_log(machine))
        assert "loop_stuck" in read_log(machine)
        assert "loop_dead" not in read_log(machine)
        assert daemon.poll() is None


def test_one_that_was_stopped_is_not_to_blame(lone_machine: Machine) -> None:
    machine = lone_machine
    with stuck_launcher(machine) as daemon:
        daemon.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(6)  # longer than it lets its loop hang, and not so long that nothing is believed any more
        daemon.send_signal(signal.SIGCONT)
        assert machine.k8e("sandbox", "sessions").json == {"sessions": []}
        assert "loop_stuck" not in read_log(machine)


def test_systemd_hears_a_beat_while_the_loop_turns(lone_machine: Machine) -> None:
    machine = lone_machine
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        place = machine.folder / "notify"
        systemd.bind(str(place))
        systemd.settimeout(DEADLINE)
        with stuck_launcher(machine, NOTIFY_SOCKET=str(place), WATCHDOG_USEC="1000000") as daemon:
            assert [systemd.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            daemon.send_signal(HANG)
            wait_until(lambda: "loop_stuck" in read_log(machine))
            systemd.settimeout(0)
            with pytest.raises(BlockingIOError):
                while True:
                    systemd.recv(64)
            systemd.settimeout(2)
            with pytest.raises(TimeoutError):
                systemd.recv(64)
            assert daemon.wait(DEADLINE) == 1


def test_the_log_s_descriptor_stays_while_its_files_change(tmp_path: Path) -> None:
    """The watchdog's thread writes there at any time, and faulthandler keeps the number."""
    path = tmp_path / "daemon.log"
    handler = LogFile(path, maxBytes=64, backupCount=1)
    number, during = handler.descriptor, list[bool]()

    def rotate(source: str, target: str) -> None:
        during.append(os.path.samestat(os.fstat(number), os.stat(source)))
        os.rename(source, target)

    handler.rotator = rotate
    try:
        for count in range(5):
            handler.emit(logging.LogRecord("k8e", logging.INFO, "", 0, f"{count}" * 50, None, None))
            assert handler.descriptor == number
            assert os.path.samestat(os.fstat(number), path.stat()), "the newest file"
            assert not os.get_inheritable(number)
        assert during == [True] * 4, "not closed meanwhile"
    finally:
        handler.close()
        os.close(number)
