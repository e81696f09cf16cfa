"""Profile by mode, each cell tried from inside a running sandbox, on both runtimes.

The machine's only way out is the small internet of tests/egress: every name and address there is a host in a
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
from tests.agentkernel.runtimes import open_machine
from tests.egress.conftest import internet as internet  # noqa: PLC0414 - a fixture
from tests.egress.internet import NAME_SERVER, Internet
from tests.egress.zones import Zone
from tests.sandboxes import needs_root
from tests.scenarios.user import is_alive

pytestmark = needs_root

VENDORS = {
    "claude": ("api.anthropic.com", "cdn.anthropic.com"),
    "codex": ("api.openai.com", "cdn.openai.com"),
    "gemini": ("storage.googleapis.com", "a.b.googleapis.com"),
}
ALL_VENDORS = [name for names in VENDORS.values() for name in names]
ELSEWHERE = "elsewhere.example.com"
PUBLIC, METADATA, PRIVATE = "45.90.66.6", ("169.254.169.254", "100.100.100.200", "metadata.google.internal"), "10.1.2.3"
ZONE: Zone = {
    **{name: {"A": [f"45.90.31.{number}"]} for number, name in enumerate(ALL_VENDORS, 1)},
    ELSEWHERE: {"A": ["45.90.32.1"]},
    "github.com": {"A": ["45.90.33.1"]},
    "metadata.google.internal": {"A": ["45.90.34.1"]},
}
HOSTS = [*ALL_VENDORS, ELSEWHERE, "github.com", PUBLIC, *METADATA, PRIVATE]
INSIDE = (Path(__file__).parent / "inside.py").read_text()

# mode, profile: network, project, home, environment, read-only, powerless. As the seed has it, not as the code does.
CELLS: dict[tuple[str, str], str] = {
    ("native", "-"): "all no no no no no",
    ("native", "permissive"): "all yes yes yes no no",
    ("native", "moderate"): "all no no no no no",
    ("native", "restrictive"): "no no no no yes yes",
    ("claude", "-"): "list yes no no no no",
    ("claude", "permissive"): "list yes yes yes no no",
    ("claude", "moderate"): "list yes no no no no",
    ("claude", "restrictive"): "no no no no yes yes",
    ("codex", "-"): "list yes no no yes yes",
    ("codex", "permissive"): "list yes yes yes no no",
    ("codex", "moderate"): "list yes no no no no",
    ("codex", "restrictive"): "no no no no yes yes",
    ("gemini", "-"): "list yes no no no no",
    ("gemini", "permissive"): "list yes yes yes no no",
    ("gemini", "moderate"): "list yes no no no no",
    ("gemini", "restrictive"): "no no no no yes yes",
}
# Whose cage is the same as that of another, which is probed for both: what is asked of the service is compared.
SAME = {
    ("native", "moderate"): ("native", "-"),
    ("claude", "moderate"): ("claude", "-"),
    ("gemini", "-"): ("gemini", "moderate"),
    ("native", "restrictive"): ("codex", "restrictive"),
    ("claude", "restrictive"): ("codex", "restrictive"),
    ("gemini", "restrictive"): ("codex", "restrictive"),
}
LIMITS = {"memory": 256 << 20, "disk": 96 << 20, "pids": 64, "cpus": 0.7}


@pytest.fixture(scope="module", params=["gvisor", "native"])
def house(request: pytest.FixtureRequest, internet: Internet) -> Iterator[House]:
    with open_machine(request.param, f'[egress]\nnameservers = ["{NAME_SERVER}"]\n') as machine:
        house = House(machine.folder, machine.home)
        furnish(house)
        yield house


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
        ".claude/.credentials.json": "key-zz",
        ".mozilla/firefox/x/logins.json": "key-zz",
    }.items():
        path = house.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


READS = [
    *("/workspace/hello.txt", "/home/user/notes.txt", "/home/user/.config/app/x"),
    *("/home/user/.ssh", "/home/user/.ssh/id_rsa", "/home/user/.aws/credentials", "/home/user/.config/gcloud"),
    *("/home/user/.bash_history", "/home/user/.claude/.credentials.json", "/home/user/.mozilla/firefox/x/logins.json"),
]
WRITES = [
    *("/workspace/made", "/workspace/.git/config", "/workspace/.git/hooks/pre-commit", "/workspace/.git/commondir"),
    *("/workspace/agentkernel.toml", "/workspace/.claude/settings.json", "/home/user/made", "/tmp/made"),
]
ENVIRONMENT = {"GREETING": "hello", "MY_API_TOKEN": "secret-zz"}
HUNGRY = "python3 -c 'print(len(b\"x\" * (300 << 20)))'"


# The program and its argument come on stdin: both are longer than is comfortable on a command line.
START = "import sys; text, _, wanted = sys.stdin.read().partition(chr(0)); sys.argv = ['-', wanted]; exec(text)"


def probe(house: House, name: str) -> Any:
    wanted = json.dumps({"hosts": HOSTS, "reads": READS, "writes": WRITES, "env": [*ENVIRONMENT]})
    words = ("--session-id", name, "--timeout", "120", "--raw", "--stdin", f'python3 -c "{START}"')
    done = house.run(*words, stdin=(INSIDE + chr(0) + wanted).encode())
    assert done.code == 0, done
    return json.loads(done.stdout)


def options(mode: str, profile: str) -> list[str]:
    """As they are typed: without a mode, or without a profile, none is named."""
    limits = [word for name, value in LIMITS.items() for word in (f"--{name}", str(value))]
    named = [] if mode == "native" else ["--compatibility-mode", mode]
    return ["--image", "host", *limits, *named, *([] if profile == "-" else ["--profile", profile])]


def plan(house: House, mode: str, profile: str) -> dict[str, Any]:
    """The request to the service, without the names in it."""
    shown = house.object("sandbox", "create", "x", *options(mode, profile), "--dry-run", env=ENVIRONMENT)
    assert shown["mode"] == mode
    assert shown["profile"] == name_profile(mode, profile)
    return {key: value for key, value in shown.items() if key not in ("mode", "profile")}


def name_profile(mode: str, profile: str) -> str:
    return {"-": "strict" if mode == "codex" else "moderate"}.get(profile, profile)


def test_cages_that_are_called_the_same_are_the_same(tmp_path: Path) -> None:
    """And no two others are, so that each is probed below. Deciding needs no daemon."""
    house = House(tmp_path / "nowhere", tmp_path)
    furnish(house)
    plans = {cell: json.dumps(plan(house, *cell), sort_keys=True) for cell in CELLS}
    for cell, twin in SAME.items():
        assert plans[cell] == plans[twin], cell
        assert CELLS[cell] == CELLS[twin]
    assert len(set(plans.values())) == len(CELLS) - len(SAME)
    assert house.object("sandbox", "create", "x", "--compatibility-mode", "native", "--dry-run") == house.object(
        "sandbox", "create", "x", "--dry-run"
    )


@pytest.mark.parametrize(("mode", "profile"), [cell for cell in CELLS if cell not in SAME])
def test_each_cell_from_inside(house: House, internet: Internet, mode: str, profile: str) -> None:
    network, project, home, environment, read_only, powerless = CELLS[mode, profile].split()
    (house.project / "made").unlink(missing_ok=True)
    name = f"{mode}-{profile}"
    made = house.object("sandbox", "create", name, *options(mode, profile), env=ENVIRONMENT)
    internet.clear()
    try:
        found = probe(house, name)
        notes = internet.notes()
        (listed,) = [each for each in house.object("sandbox", "list")["sandboxes"] if each["name"] == name]
        hungry = house.run("--session-id", name, HUNGRY)
    finally:
        house.ok("sandbox", "remove", name)

    reached = {host for host, answer in found["reached"].items() if not answer.startswith("!")}
    allowed = {
        "all": {*ALL_VENDORS, ELSEWHERE, "github.com", PUBLIC},
        "list": {*VENDORS.get(mode, ()), "github.com"},
        "no": set(),
    }[network]
    assert reached == allowed
    assert not {address for _, address, _ in notes.packets} & {*METADATA, PRIVATE}
    if network == "no":
        assert (notes.connections, notes.names) == ([], set())
    assert found["loopback"] == "127.0.0.1"

    read, written = found["read"], found["written"]
    assert (read["/workspace/hello.txt"] == "project") == (project == "yes")
    assert written["/workspace/made"] == ("written" if project == "yes" or read_only == "no" else "!OSError")
    assert (house.project / "made").exists() == (project == "yes")
    if project == "yes":
        assert [written[path] for path in WRITES[1:4]] == ["written"] * 3, "in a copy of its own"
        assert (house.project / ".git/config").read_text() == "[core]\n"
        assert not (house.project / ".git/commondir").exists()
        for path in WRITES[4:6]:
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
    assert found["filled"] < LIMITS["disk"]
    assert json.loads(hungry.stdout)["status"] == "oom_killed"

    policy = listed["policy"]
    assert (policy["read_only"], policy["powerless"]) == (read_only == "yes", powerless == "yes")
    assert len(policy["mounts"]) == (project == "yes") + (home == "yes")
    shown = made["effective"]
    assert [mount["target"] for mount in policy["mounts"]] == [mount["target"] for mount in shown["mounts"]]
    assert set(shown.get("more_hosts", shown.get("allowed_hosts"))) <= set(policy["allowed_hosts"])
    assert {key: policy["limits"][key] for key in LIMITS} == LIMITS
    assert made["effective"]["profile"] == listed["profile"] == name_profile(mode, profile)


def test_no_network_is_nothing_but_loopback(house: House, internet: Internet) -> None:
    words = ("--image", "host", "--no-network", "--compatibility-mode", "claude")
    house.ok("sandbox", "create", "alone", *words)
    internet.clear()
    try:
        found = probe(house, "alone")
    finally:
        house.ok("sandbox", "remove", "alone")
    assert all(answer.startswith("!") for answer in found["reached"].values())
    assert found["loopback"] == "127.0.0.1"
    notes = internet.notes()
    assert notes.connections == []
    assert notes.names == set()


def test_the_daemon_ends_when_it_is_told_to(house: House) -> None:
    pid = house.daemon_pid
    house.ok("daemon", "stop")
    assert house.ak("daemon", "status").code == 2
    assert not is_alive(pid)
