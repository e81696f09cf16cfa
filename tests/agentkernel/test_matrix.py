"""Profile by mode, each cell tried from inside a running sandbox, on both runtimes.

The machine's only way out is the small internet of tests/egress: every name and address there is somebody in a
namespace of the test's own, metadata services too, so that a refusal means something and nothing leaves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agentkernel.house import House
from tests.cli.machine import Machine, make_folder
from tests.egress.conftest import internet as internet  # noqa: PLC0414 - a fixture
from tests.egress.internet import NAME_SERVER, Internet
from tests.egress.zones import Zone
from tests.sandboxes import needs_root
from tests.scenarios.user import clear_machine, is_alive, start_without_gvisor

pytestmark = needs_root

VENDORS = {"claude": "api.anthropic.com", "codex": "api.openai.com", "gemini": "storage.googleapis.com"}
ELSEWHERE = "elsewhere.example.com"
PUBLIC, METADATA, PRIVATE = "45.90.66.6", ("169.254.169.254", "100.100.100.200", "metadata.google.internal"), "10.1.2.3"
ZONE: Zone = {
    **{name: {"A": [f"45.90.31.{number}"]} for number, name in enumerate(VENDORS.values(), 1)},
    ELSEWHERE: {"A": ["45.90.32.1"]},
    "github.com": {"A": ["45.90.33.1"]},
    "metadata.google.internal": {"A": ["45.90.34.1"]},
}
HOSTS = [*VENDORS.values(), ELSEWHERE, "github.com", PUBLIC, *METADATA, PRIVATE]
INSIDE = (Path(__file__).parent / "inside.py").read_text()

# mode, profile: network, project, home, environment, read-only, powerless. As the seed has it, not as the code does.
CELLS: dict[tuple[str, str], str] = {
    ("", ""): "all no no no no no",
    ("", "permissive"): "all yes yes yes no no",
    ("", "restrictive"): "no no no no yes yes",
    ("claude", ""): "list yes no no no no",
    ("codex", ""): "list yes no no yes yes",
    ("gemini", "moderate"): "list yes no no no no",
    ("claude", "restrictive"): "no no no no yes yes",
    ("codex", "permissive"): "list yes yes yes no no",
}


@pytest.fixture(scope="module", params=["gvisor", "native"])
def house(request: pytest.FixtureRequest, internet: Internet) -> Iterator[House]:
    with make_folder() as folder:
        home = folder / "home"
        home.mkdir()
        (folder / "k8e.toml").write_text(
            f'[pool]\nenabled = false\n[gateway]\nlisten = ""\n[egress]\nnameservers = ["{NAME_SERVER}"]\n'
        )
        house = House(folder, home)
        furnish(house)
        try:
            if request.param == "native":
                start_without_gvisor(house)
            runtime = house.object("daemon", "start")["runtime"]
            if runtime != request.param:
                pytest.skip(f"{request.param} does not work here")
            yield house
        finally:
            clear_machine(Machine(folder, home))


def furnish(house: House) -> None:
    """A project with a repository, and a home with secrets."""
    for name, content in {
        "hello.txt": "project",
        ".git/config": "[core]\n",
        ".git/hooks/pre-commit": "#!/bin/sh\n",
        "agentkernel.toml": "",
    }.items():
        house.write(name, content)
    for name, content in {
        "notes.txt": "home",
        ".ssh/id_rsa": "key-zz",
        ".aws/credentials": "key-zz",
        ".config/gcloud/x": "key-zz",
        ".config/app/x": "config",
        ".bash_history": "typed-zz",
    }.items():
        path = house.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


READS = [
    *("/workspace/hello.txt", "/home/user/notes.txt", "/home/user/.config/app/x"),
    *("/home/user/.ssh", "/home/user/.ssh/id_rsa", "/home/user/.aws/credentials", "/home/user/.config/gcloud"),
    "/home/user/.bash_history",
]
WRITES = [
    *("/workspace/made", "/workspace/.git/config", "/workspace/.git/hooks/pre-commit", "/workspace/.git/commondir"),
    *("/workspace/agentkernel.toml", "/workspace/.claude/settings.json", "/home/user/made", "/tmp/made"),
]
ENVIRONMENT = {"GREETING": "hello", "MY_API_TOKEN": "secret-zz"}


# The program and its argument come on stdin: both are longer than is comfortable on a command line.
START = "import sys; text, _, wanted = sys.stdin.read().partition(chr(0)); sys.argv = ['-', wanted]; exec(text)"


def probe(house: House, name: str) -> Any:
    wanted = json.dumps({"hosts": HOSTS, "reads": READS, "writes": WRITES, "env": [*ENVIRONMENT, "HOME"]})
    words = ("--session-id", name, "--timeout", "120", "--raw", "--stdin", f'python3 -c "{START}"')
    done = house.run(*words, stdin=(INSIDE + chr(0) + wanted).encode())
    assert done.code == 0, done
    return json.loads(done.stdout)


@pytest.mark.parametrize(("mode", "profile"), CELLS)
def test_each_cell_from_inside(house: House, internet: Internet, mode: str, profile: str) -> None:
    network, project, home, environment, read_only, powerless = CELLS[mode, profile].split()
    (house.project / "made").unlink(missing_ok=True)
    options = [*(("--compatibility-mode", mode) if mode else ()), *(("--profile", profile) if profile else ())]
    name = f"{mode or 'native'}-{profile or 'usual'}"
    made = house.object("sandbox", "create", name, "--image", "host", "--memory", "256m", *options, env=ENVIRONMENT)
    internet.clear()
    try:
        found = probe(house, name)
        notes = internet.notes()
        (listed,) = [each for each in house.object("sandbox", "list")["sandboxes"] if each["name"] == name]
    finally:
        house.ok("sandbox", "remove", name)

    reached = {host for host, answer in found["reached"].items() if not answer.startswith("!")}
    allowed = {
        "all": {*VENDORS.values(), ELSEWHERE, "github.com", PUBLIC},
        "list": {VENDORS.get(mode, ""), "github.com"},
        "no": set(),
    }[network]
    assert reached == allowed
    assert not {address for _, address, _ in notes.packets} & {*METADATA, PRIVATE}
    assert found["loopback"] == "127.0.0.1"

    read, written = found["read"], found["written"]
    assert (read["/workspace/hello.txt"] == "project") == (project == "yes")
    assert written["/workspace/made"] == ("written" if project == "yes" or read_only == "no" else "!OSError")
    assert (house.project / "made").exists() == (project == "yes")
    if project == "yes":
        for path in WRITES[1:6]:
            assert written[path].startswith("!"), path
        assert not (house.project / ".claude").exists()  # it stood there while the sandbox lived
        assert (house.project / "made").stat().st_uid == os.geteuid()
    assert (read["/home/user/notes.txt"] == "home") == (home == "yes")
    assert (read["/home/user/.config/app/x"] == "config") == (home == "yes")
    assert "-zz" not in json.dumps(found)
    assert written["/home/user/made"] == ("written" if home == "no" and read_only == "no" else "!OSError")
    assert written["/tmp/made"] == "written"
    assert not (house.home / "made").exists()

    assert found["env"]["GREETING"] == ("hello" if environment == "yes" else None)
    assert found["env"]["MY_API_TOKEN"] is None
    assert found["root"] == (read_only == "yes")
    assert (found["capabilities"] == 0x1E0) == (powerless == "yes"), hex(found["capabilities"])

    policy = listed["policy"]
    assert (policy["read_only"], policy["powerless"]) == (read_only == "yes", powerless == "yes")
    assert len(policy["mounts"]) == (project == "yes") + (home == "yes")
    assert policy["limits"]["memory"] == 256 << 20
    expected = profile or ("strict" if mode == "codex" else "moderate")
    assert made["effective"]["profile"] == listed["profile"] == expected


def test_no_network_is_nothing_but_loopback_and_limits_hold(house: House, internet: Internet) -> None:
    words = ("--image", "host", "--no-network", "--compatibility-mode", "claude", "--memory", "96m")
    house.ok("sandbox", "create", "alone", *words)
    internet.clear()
    try:
        found = probe(house, "alone")
        hungry = house.run("--session-id", "alone", "python3 -c 'print(len(b\"x\" * (300 << 20)))'")
    finally:
        house.ok("sandbox", "remove", "alone")
    assert all(answer.startswith("!") for answer in found["reached"].values())
    assert found["loopback"] == "127.0.0.1"
    notes = internet.notes()
    assert notes.connections == []
    assert notes.names == set()
    assert json.loads(hungry.stdout)["status"] == "oom_killed"


def test_the_daemon_ends_when_it_is_told_to(house: House) -> None:
    pid = house.daemon_pid
    house.ok("daemon", "stop")
    assert house.ak("daemon", "status").code == 2
    assert not is_alive(pid)
