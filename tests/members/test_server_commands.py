"""A second server, a backup and the way back, by the commands that a person types."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.members.commands import K8E, PROGRAMS, Terminal
from tests.members.conftest import ROOT, until
from tests.members.machine import Segment, make_segment

SERVE = ("server", "--cluster", "--disable-sandbox-matrix")


@pytest.fixture(scope="module")
def programs() -> Path:
    target = ROOT / "build" / "members-programs" / "programs"  # the same as of other tests by commands
    command = [K8E, "cluster", "build", "--without-sandboxes", "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def machines() -> Iterator[Segment]:
    folder = ROOT / "build" / "members-servers"
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as found:
        yield found


def name_address(terminal: Terminal) -> tuple[str, str]:
    return "--node-ip", terminal.machine.address


def test_a_second_server_joins_and_leaves_and_a_backup_brings_all_back(machines: Segment, programs: Path) -> None:
    one, two = (Terminal(machines.make(name), programs) for name in ("one", "two"))
    one.start(*SERVE, *name_address(one))
    one.wait_ready()
    made = one.ask("cluster", "token", "create", "--server", "--ttl", "1h")
    assert {each["for"] for each in one.ask("cluster", "token", "list")["tokens"]} == {"worker", "server"}
    two.start(*SERVE, *name_address(two), K8E_URL=f"https://{one.machine.address}:6443", K8E_TOKEN=made["token"])
    two.wait_ready()
    nodes = two.ask("cluster", "status")["nodes"]
    assert {(each["node"], each["role"]) for each in nodes} == {("one", "server"), ("two", "server")}

    one.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    kept = str(one.machine.folder / "kept.tar")
    backup = one.ask("cluster", "backup", "--output", kept, "--bin-dir", PROGRAMS)
    checked = one.ask("cluster", "backup", "--check", kept, "--bin-dir", PROGRAMS)
    assert (checked["revision"], checked["keys"]) == (backup["revision"], backup["keys"])
    assert one.refuse("cluster", "restore", kept, "--bin-dir", PROGRAMS, *name_address(one)) == "already_running"

    assert two.ask("cluster", "leave", "--yes")["left"] == []
    two.wait_ended()
    until(lambda: len(json.loads(one.kubectl("get", "nodes", "--output=json"))["items"]) == 1)
    assert one.ask("cluster", "status")["ok"]  # with one member etcd has a majority of one
    assert one.refuse("cluster", "leave", "--yes") == "is_a_server"

    one.kubectl("delete", "configmap", "kept")
    one.end()
    one.ask("cluster", "restore", kept, "--bin-dir", PROGRAMS, *name_address(one))
    one.start(*SERVE, *name_address(one))
    one.wait_ready()
    assert json.loads(one.kubectl("get", "configmap", "kept", "--output=json"))["data"] == {"a": "b"}
