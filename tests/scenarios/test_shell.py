"""A person at a terminal opens a shell in a session, leaves it and comes back: on each runtime, here and through the
gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.agentkernel.window import Window, open_window
from tests.cli.machine import K8E, wait_until
from tests.scenarios.user import User

pytestmark = pytest.mark.usefixtures("place")  # the daemon of each runtime is started once

SID = "box"
LEAVE = b"\x10\x11"
QUIET = b"PS1=; stty -echo; echo rea''dy\n"
TELL_SIZES = """exec python3 -c '
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", flush=True)
while signal.sigwait([signal.SIGWINCH]):
    os.write(1, b"%d %d\\n" % tuple(reversed(os.get_terminal_size(0))))
'"""

# The shell names a job that it brings to the front before the job is there: only the job itself knows. And not
# `sh -c 'echo; sleep'`: dash loses a ^C that comes while it starts a program, on any machine.
JOB = b"""python3 -c '
import os, time
place = None
while True:
    if place != (place := "in front" if os.tcgetpgrp(0) == os.getpgrp() else "behind"):
        print(place, flush=True)
    time.sleep(0.01)
'
"""


@pytest.fixture(scope="module", params=["here", "gateway"])
def person(
    request: pytest.FixtureRequest, place: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[User]:
    """Has a session, and uses it on the machine itself or through the gateway."""
    runtime, folder = place
    person = User(folder, tmp_path_factory.mktemp("home"), runtime=runtime)
    if request.param == "gateway":
        key = person.k8e("sandbox-apikey", "create", "shells").json
        person.overrides |= {"K8E_SANDBOX_ENDPOINT": key["endpoint"], "K8E_SANDBOX_APIKEY": key["key"]}
    assert person.k8e("sandbox", "create", "--session-id", SID, "--env", "COLOUR=blue").code == 0
    yield person
    assert person.k8e("sandbox", "destroy", SID).code == 0  # by its owner: two sessions have this id


@pytest.fixture
def window(person: User) -> Iterator[Window]:
    """With a shell that is ready."""
    with open_shell(person) as window:
        window.type(QUIET)
        window.wait_for(b"ready\r\n")
        try:
            yield window
        finally:  # of a test that failed nothing is left for the next one to come back to
            for run in person.k8e("sandbox", "log", SID).json["runs"]:
                if run["status"] == "running":
                    person.k8e("sandbox", "kill", run["run_id"])


def open_shell(person: User, *words: str) -> AbstractContextManager[Window]:
    return open_window(person, [K8E, "sandbox", "shell", SID, *words])


def test_is_an_interactive_shell_with_size_environment_and_exit_code(window: Window) -> None:
    window.type(b"stty size; tty; echo $0 $PWD $COLOUR $TERM\n")
    window.wait_for(b"33 101\r\n/dev/pts/")
    window.wait_for(b"bash /workspace blue xterm-color\r\n")
    window.type(b"exit 7\n")
    assert window.finish() == 7
    assert window.mode == window.mode_before


def test_keys_are_signals_and_jobs_are_controlled(window: Window) -> None:
    window.type(b"PS1='@ '\n")
    window.wait_for(b"@ ")
    window.type(JOB)
    window.wait_for(b"in front\r\n")
    window.type(b"\x03")
    window.wait_for(b"@ ")
    window.type(b"echo status $?\n")
    window.wait_for(b"status 130\r\n")
    window.type(JOB)
    window.wait_for(b"in front\r\n")
    window.type(b"\x1a")
    window.wait_for(b"Stopped")
    window.wait_for(b"@ ")
    window.type(b"bg\n")
    window.wait_for(b"behind\r\n")
    window.type(b"fg\n")
    window.wait_for(b"in front\r\n")
    window.type(b"\x03")
    window.wait_for(b"@ ")
    window.type(b"exit 3\n")
    assert window.finish() == 3


def test_the_size_follows_the_window(person: User) -> None:
    with open_shell(person, "--command", TELL_SIZES) as window:
        window.wait_for(b"ready\r\n")
        window.resize(50, 132)
        window.wait_for(b"50 132\r\n")
        window.resize(1, 2)
        window.wait_for(b"1 2\r\n")
        window.type(b"\x03")
        assert window.finish() == 130


def test_the_session_of_another_tenant_is_refused(person: User) -> None:
    if "K8E_SANDBOX_APIKEY" not in person.overrides:
        return  # tests/core/test_attachments.py has other users of the machine
    here = User(person.folder, person.home, {"K8E_SANDBOX_ENDPOINT": "local"})
    key = here.k8e("sandbox-apikey", "create", "other", "--tenant", "other").json["key"]
    stranger = User(person.folder, person.home, {**person.overrides, "K8E_SANDBOX_APIKEY": key})
    with open_shell(stranger) as window:
        assert window.finish() == 1
        assert b"[session_not_found]" in window.screen


def test_a_command_of_another_user(person: User) -> None:
    with open_shell(person, "--user", "root", "--command", "id -u; tty; exit 5") as window:
        window.wait_for(b"0\r\n/dev/pts/")
        assert window.finish() == 5


def test_left_with_the_keys_it_runs_on_and_is_come_back_to(person: User, window: Window) -> None:
    window.type(b"kept=it; echo shown\n")
    window.wait_for(b"shown\r\n")
    window.type(LEAVE)
    assert window.finish() == 0
    assert b"detached" in window.screen
    assert window.mode == window.mode_before
    come_back_and_end(person)


def test_a_killed_client_leaves_it_running(person: User, window: Window) -> None:
    window.type(b"kept=it; echo shown\n")
    window.wait_for(b"shown\r\n")
    window.process.kill()
    window.finish()
    come_back_and_end(person)


def test_a_killed_daemon_leaves_it_running(person: User, window: Window) -> None:
    window.type(b"kept=it; echo shown\n")
    window.wait_for(b"shown\r\n")
    person.kill_the_daemon()
    assert window.finish() == 1
    assert b"[connection_lost]" in window.screen
    assert b"the shell runs on" in window.screen
    assert window.mode == window.mode_before
    person.bring_the_daemon_back()
    if "K8E_SANDBOX_ENDPOINT" in person.overrides:  # it has another port
        there = User(person.folder, person.home, runtime=person.runtime).k8e("sandbox", "status").json
        person.overrides["K8E_SANDBOX_ENDPOINT"] = there["gateway"]["endpoint"]
    come_back_and_end(person)


def come_back_and_end(person: User) -> None:
    """To the shell with a variable of its own, whose last output is shown again."""
    wait_until(lambda: came_back(person))


def came_back(person: User) -> bool:
    """False: the daemon has not noticed yet that the client is gone."""
    with open_shell(person) as window:
        window.wait_for(b"leaves it running\r\n")
        if b"back at" not in window.before:
            window.type(b"exit\n")
            window.finish()
            return False
        window.wait_for(b"shown\r\n")
        window.type(b"echo $kept again; exit 9\n")
        window.wait_for(b"it again\r\n")
        assert window.finish() == 9
    return True
