"""`k8e sandbox destroy --all`: it asks, and ends what is the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import K8E, Machine
from tests.cli.terminal import open_terminal
from tests.gateway.house import House, open_house


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house


@pytest.fixture
def machine(house: House, tmp_path: Path) -> Machine:
    return Machine(house.machine.folder, tmp_path)


def create(machine: Machine, *words: str) -> str:
    return str(machine.k8e("sandbox", "create", *words).json["session_id"])


def test_without_a_terminal_it_wants_to_be_told(machine: Machine) -> None:
    session = create(machine)
    for words in (["--all"], []):
        done = machine.k8e("sandbox", "destroy", *words)
        assert (done.code, done.json["code"]) == (1, "not_confirmed" if words else "usage")
    assert "--yes" in machine.k8e("sandbox", "destroy", "--all").json["hint"]
    assert machine.k8e("sandbox", "destroy", "--all", session).json["code"] == "usage"
    assert session in machine.live_sessions()
    assert machine.k8e("sandbox", "destroy", "--all", "--yes").json == {"ok": True, "destroyed": [session]}
    assert machine.k8e("sandbox", "destroy", "--all").json == {"ok": True, "destroyed": []}


def test_at_a_terminal_it_asks(machine: Machine) -> None:
    sessions = sorted([create(machine, "--tenant", "web"), create(machine, "--persistent")])
    with open_terminal(machine, K8E, "sandbox", "destroy", "--all") as person:
        assert b"(persistent)" in person.wait_for_stderr(b"Type yes: ")
        person.type("no\n")
        done = person.finish()
    assert (done.code, b'"not_confirmed"' in done.stdout) == (1, True)
    assert sorted(machine.live_sessions()) == sessions
    with open_terminal(machine, K8E, "sandbox", "destroy", "--all") as person:
        person.wait_for_stderr(b"Type yes: ")
        person.type("yes\n")
        done = person.finish()
    assert (done.code, b'"ok": true' in done.stdout) == (0, True)
    assert machine.live_sessions() == []


def test_a_parent_and_its_child(machine: Machine) -> None:
    parent = create(machine)
    child = machine.k8e("sandbox", "subagent", parent).json["session_id"]
    assert sorted(machine.k8e("sandbox", "destroy", "--all", "--yes").json["destroyed"]) == sorted([parent, child])


def test_those_of_a_tenant_are_not_roots_own_and_the_other_way_round(house: House, machine: Machine) -> None:
    mine, guest = create(machine), house.tenant("acme")
    theirs = [guest.create(), guest.create()]
    assert machine.k8e("sandbox", "destroy", "--all", "--yes").json["destroyed"] == [mine]
    mine = create(machine)
    away = Machine(machine.folder, machine.home, {"K8E_SANDBOX_ENDPOINT": house.endpoint})
    away.overrides["K8E_SANDBOX_APIKEY"] = house.make_key("another", tenant_ids=["acme"])
    assert sorted(away.k8e("sandbox", "destroy", "--all", "--yes").json["destroyed"]) == sorted(theirs)
    assert machine.live_sessions() == [mine]
    theirs = [guest.create()]
    done = machine.k8e("sandbox", "destroy", "--all", "--yes", "--owner", "gateway")
    assert done.json["destroyed"] == theirs
    machine.k8e("sandbox", "destroy", mine)
