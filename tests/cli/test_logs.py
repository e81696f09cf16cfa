"""`k8e sandbox logs`: the output of background runs, here and through a gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import DEADLINE, Machine
from tests.gateway.house import House, open_house

TALKS = "mkfifo go; printf 'out\\377'; printf err >&2; read line < go; printf more; exit 7"


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house


@pytest.fixture(params=["here", "away"])
def machine(request: pytest.FixtureRequest, house: House, tmp_path: Path) -> Machine:
    machine = Machine(house.machine.folder, tmp_path)
    if request.param == "away":
        machine.overrides["K8E_SANDBOX_ENDPOINT"] = house.endpoint
        machine.overrides["K8E_SANDBOX_APIKEY"] = house.make_key(f"key-{os.urandom(4).hex()}", scope="admin")
    return machine


def start(machine: Machine, code: str) -> tuple[str, str]:
    run = machine.run(code, "--background", "--timeout", "5m").json
    return run["run_id"], run["session_id"]


def test_are_followed_to_the_end_with_the_runs_own_exit_code(machine: Machine) -> None:
    run, session = start(machine, TALKS)
    with machine.start("sandbox", "logs", run, "--follow") as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert os.read(following.stdout.fileno(), 4) == b"out\xff"  # while it runs
        assert following.stderr.read(3) == b"err"
        assert machine.k8e("sandbox", "logs", run).stdout == b"out\xff"
        assert machine.run("echo > go", "--session-id", session).code == 0
        assert following.stdout.read() == b"more"
        assert following.wait(DEADLINE) == 7
    done = machine.k8e("sandbox", "logs", run, "-f")
    assert (done.code, done.stdout, done.stderr) == (7, b"out\xffmore", b"err")
    assert machine.k8e("sandbox", "logs", run).code == 0


def test_of_which_much_is_not_kept_say_how_much(machine: Machine) -> None:
    run, _ = start(machine, "head -c 3000000 /dev/zero")
    machine.k8e("sandbox", "logs", run, "--follow")
    done = machine.k8e("sandbox", "logs", run, "--follow")
    assert (done.code, len(done.stdout)) == (0, 1 << 20)
    assert done.stderr == b"k8e: %d bytes of stdout are not kept any more\n" % (3_000_000 - (1 << 20))


def test_are_left_without_an_end_to_the_run(machine: Machine) -> None:
    run, session = start(machine, TALKS)
    with machine.start("sandbox", "logs", run, "--follow") as following:
        assert following.stdout is not None
        assert os.read(following.stdout.fileno(), 4) == b"out\xff"
        following.send_signal(signal.SIGINT)
        assert following.wait(DEADLINE) == -signal.SIGINT
    assert machine.k8e("sandbox", "poll", run).json["status"] == "running"
    machine.run("echo > go", "--session-id", session)
    assert machine.k8e("sandbox", "logs", run, "--follow").code == 7


def test_of_no_run_are_an_error(machine: Machine) -> None:
    done = machine.k8e("sandbox", "logs", "run-0123456789abcdef", "--follow")
    assert (done.code, done.json["code"]) == (1, "run_not_found")
