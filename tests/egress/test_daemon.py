"""The daemon is killed while sandboxes try to get out: the rules stay, nothing opens, and the next one takes over.

What the command line says about all this is in tests/cli/test_egress.py."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.cli.machine import Machine, make_folder, wait_until
from tests.egress.internet import NAME_SERVER, Internet
from tests.egress.zones import Zone
from tests.engine.answers import plant_answers
from tests.runtimes import do_without

ZONE: Zone = {"allowed.com": {"A": ["45.90.31.1"]}, "evil.com": {"A": ["45.90.66.6"]}}
GET = "curl -sS --max-time 20"
UNKNOWN, SHUT = "6", "7"  # curl: could not resolve host; failed to connect

# Says how each attempt of a round ended. With addresses only: without a daemon names wait for a resolver's patience.
LOOP = """
while sleep 0.1; do
    for url in 45.90.31.1 45.90.66.6 169.254.169.254 45.90.28.2:7777 [2a0b:4340:66::6]; do
        curl -s -o /dev/null --max-time 20 "http://$url/"; echo "$url $?" >> /workspace/attempts
    done
    echo round >> /workspace/attempts
done
"""


@pytest.fixture(scope="module")
def machine(internet: Internet) -> Iterator[Machine]:
    with make_folder() as folder:
        home = folder / "home"
        home.mkdir()
        settings = folder / "k8e.toml"
        settings.write_text(f'[pool]\nenabled = false\n[egress]\nnameservers = ["{NAME_SERVER}"]\n')
        plant_answers(folder / "s", home)
        machine = Machine(folder, home)
        yield machine
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)
        end_daemon(machine, signal.SIGTERM)


def end_daemon(machine: Machine, number: signal.Signals) -> None:
    daemon = machine.daemon_pid
    os.kill(daemon, number)
    wait_until(lambda: not os.path.exists(f"/proc/{daemon}"))


def reach(machine: Machine, session: str, url: str) -> str:
    """The address that answered, or curl's exit code."""
    done = json.loads(machine.run("--session-id", session, f"{GET} {url}").stdout)
    return str(json.loads(done["stdout"])["address"] if done["exit_code"] == 0 else done["exit_code"])


@pytest.mark.parametrize("runtime", ["gvisor", "native"])
def test_the_daemon_is_killed_and_nothing_opens(machine: Machine, internet: Internet, runtime: str) -> None:
    created = machine.k8e("sandbox", "create", "--runtime", runtime, "--allowed-hosts", "Allowed.COM.")
    if created.code != 0:
        do_without(runtime, created.stdout)
    session = created.json["session_id"]
    sandboxes = machine.folder / "s" / "sandboxes"
    wait_until(lambda: len(os.listdir(sandboxes)) == 1)  # other runtimes are tried behind the first caller
    (sandbox,) = sandboxes.iterdir()
    attempts = sandbox / "disk/workspace/attempts"
    # A service of the machine: the sandbox never comes so far.
    with socket.create_server((("45.90.28.2"), 7777)) as service:
        assert reach(machine, session, "http://allowed.com/") == "45.90.31.1"
        assert json.loads(machine.run("--session-id", session, "--background", LOOP).stdout)["run_id"]

        def rounds() -> int:
            return attempts.read_text().count("round") if attempts.exists() else 0

        wait_until(lambda: rounds() >= 1)
        internet.clear()
        end_daemon(machine, signal.SIGKILL)
        before = rounds()
        wait_until(lambda: rounds() >= before + 2)
        # The next command starts another one, which finds the session and its list.
        assert reach(machine, session, "http://allowed.com/") == "45.90.31.1"
        assert reach(machine, session, "http://evil.com/") == UNKNOWN
        assert reach(machine, session, "http://45.90.66.6/") == SHUT
        service.settimeout(0)
        with pytest.raises(BlockingIOError):
            service.accept()
    ended = {tuple(line.split()) for line in attempts.read_text().splitlines() if " " in line}
    assert ended == {
        ("45.90.31.1", "0"), ("45.90.66.6", SHUT), ("169.254.169.254", SHUT), ("45.90.28.2:7777", SHUT),
        ("[2a0b:4340:66::6]", SHUT),
    }  # fmt: skip
    notes = internet.notes()
    assert {address for _, address, _ in notes.packets} <= {"45.90.31.1", NAME_SERVER}
    assert notes.names <= {"allowed.com"}
    assert machine.k8e("sandbox", "destroy", session).json["ok"] is True


def test_a_child_reaches_what_its_parent_does_and_loses_it_with_it(machine: Machine) -> None:
    create = ("sandbox", "create", "--runtime", "native", "--allowed-hosts", "allowed.com,evil.com")
    parent = machine.k8e(*create).json["session_id"]
    child = machine.k8e("sandbox", "subagent", parent).json["session_id"]
    less = machine.k8e("sandbox", "subagent", parent, "--allowed-hosts", "allowed.com").json["session_id"]
    assert [reach(machine, one, "http://evil.com/") for one in (parent, child, less)] == ["45.90.66.6"] * 2 + [UNKNOWN]
    assert machine.k8e("sandbox", "allow-hosts", parent, "--remove", "evil.com").code == 0
    for one in (parent, child, less):
        assert reach(machine, one, "http://allowed.com/") == "45.90.31.1"
        assert reach(machine, one, "http://evil.com/") == UNKNOWN
        assert reach(machine, one, "http://45.90.66.6/") == SHUT
    assert machine.k8e("sandbox", "destroy", parent).json["ok"] is True
