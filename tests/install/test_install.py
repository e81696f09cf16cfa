"""The real wheel, installed with uv below root's home with its dependencies, then `k8e doctor --fix`: a whole
installation for every user, which can be upgraded and taken back. At the real paths, in a mount namespace."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.private_machine import PrivateMachine, open_private_machine
from tests.install.release import make_release

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="only root installs"), pytest.mark.timeout(600)]

UV = str(Path(sys.executable).with_name("uv"))
SOURCE = "/root/.local/share/uv/tools/k8e"
STEPS = "import sys, json; from k8e.cli.install.install import install; print(json.dumps([(s.what, s.done, s.detail) for s in install([])]))"  # noqa: E501
DAEMON = "/usr/local/lib/k8e/current/bin/k8e"


@pytest.fixture(scope="module")
def machine() -> Iterator[PrivateMachine]:
    """Without a daemon, and k8e installed for root alone."""
    (wheel,) = make_release().glob("k8e-*.whl")
    with open_private_machine() as machine:
        base = getattr(sys, "_base_executable", sys.executable)
        machine.run(UV, "tool", "install", "--quiet", "--python", base, wheel)
        yield machine


def become(machine: PrivateMachine, group: str, *words: str, code: int | None = 0) -> str:
    user = ["setpriv", "--reuid=65534", f"--regid={group}", "--clear-groups", "env", f"HOME={machine.folder}/home"]
    return machine.run(*user, *words, code=code)


def test_the_way_from_the_wheel_to_nothing(machine: PrivateMachine) -> None:
    before = machine.list_files()
    assert become(machine, "65534", f"{SOURCE}/bin/k8e", "--version", code=126) == "", "root's home is root's"
    report = machine.json(f"{SOURCE}/bin/k8e", "doctor", "--fix", "--json")
    not_done = [step["what"] for step in report["fixed"] if not step["done"] and not step["what"].startswith("groups ")]
    assert not_done in ([], ["enable the service"]), report["fixed"]
    assert report["safe"]
    check_what_is_where(machine)
    check_that_users_can_use_it(machine)
    check_that_a_damaged_environment_changes_nothing(machine)
    check_upgrade(machine)
    check_that_it_is_taken_back(machine)
    # Of what was there before, the state directory is gone as well, and a package source of ours.
    ours = {name for name in before if name.startswith("/var/lib/k8e/")} | {
        "/etc/apt/sources.list.d/k8e-backports.sources"
    }
    changing = {"/etc/group-", "/etc/gshadow-", "/etc/.pwd.lock"}  # groupadd's own
    assert machine.list_files() - changing == before - ours - changing
    assert not machine.exists("/usr/local/lib/systemd")
    assert "k8e:" not in machine.run("cat", "/etc/group")


def check_what_is_where(machine: PrivateMachine) -> None:
    assert machine.run("bash", "-c", "type -P k8e agentkernel k8e-sandbox").split() == [
        "/usr/local/bin/k8e",
        "/usr/local/bin/agentkernel",
        "/usr/local/bin/k8e-sandbox",
    ]
    modes = machine.run(
        "find", "/usr/local/lib/k8e", "-not", "-type", "l", "(", "-not", "-user", "0", "-o", "-perm", "/022", ")"
    )
    assert modes == "", "root's alone"
    unreadable = machine.run("find", "/usr/local/lib/k8e", "-not", "-type", "l", "-not", "-perm", "-004")
    assert unreadable == "", "and open to all"
    assert machine.run("getent", "group", "k8e").startswith("k8e:")
    assert "pip" in json.loads(machine.run("cat", "/var/lib/k8e/tools/layer.json"))
    for program in ("k8e", "agentkernel", "k8e-sandbox"):
        assert "NAME" in machine.run("man", program)
    if machine.run("sh", "-c", "command -v systemd-analyze", code=None):
        machine.run("systemd-analyze", "verify", "k8e.service")
    assert f"ExecStart={DAEMON} server" in machine.run("cat", "/usr/local/lib/systemd/system/k8e.service")
    if machine.run("sh", "-c", "command -v fish", code=None):
        assert "sandbox\t" in machine.run("fish", "-c", 'complete -C "k8e sandb"')
    if machine.run("sh", "-c", "command -v zsh", code=None):
        found = "autoload -Uz compinit && compinit -u -D && print $_comps[k8e] $_comps[agentkernel]"
        assert machine.run("zsh", "-fc", found) == "_k8e _agentkernel\n"
    script = "/usr/local/share/bash-completion/completions/agentkernel"
    assert "_k8e_complete agentkernel" in machine.run("bash", "-c", f". {script} && complete -p agentkernel")


def check_that_users_can_use_it(machine: PrivateMachine) -> None:
    """Root's command starts the daemon; members of the group use it, others do not."""
    assert become(machine, "65534", "k8e", "--version") == machine.run("k8e", "--version")
    assert machine.json("k8e", "sandbox", "run", "echo of root")["stdout"] == "of root\n"
    told = become(machine, "k8e", "k8e", "sandbox", "run", "echo of a member", "--json")
    assert json.loads(told)["stdout"] == "of a member\n"
    refused = json.loads(become(machine, "65534", "k8e", "sandbox", "run", "true", code=2))
    assert refused["code"] == "daemon_not_allowed"


def check_that_a_damaged_environment_changes_nothing(machine: PrivateMachine) -> None:
    before = machine.run("readlink", "/usr/local/lib/k8e/current")
    file = machine.run("sh", "-c", f"ls {SOURCE}/lib/python3*/site-packages/k8e/errors.py").strip()
    record = machine.run("sh", "-c", f"ls {SOURCE}/lib/python3*/site-packages/k8e-*.dist-info/RECORD").strip()
    machine.run("cp", "-p", file, "/root/kept")
    machine.run("cp", "-p", record, "/root/record")
    machine.run("sh", "-c", f"echo '# broken' >> {file}; tail -n 1 /root/record >> {record}")  # another content
    steps = json.loads(machine.run(f"{SOURCE}/bin/python", "-I", "-c", STEPS))
    assert tuple(steps[0][:2]) == ("install the program in /usr/local/lib/k8e", False)
    assert "is not as it was installed" in steps[0][2]
    assert machine.run("readlink", "/usr/local/lib/k8e/current") == before
    assert machine.run("sh", "-c", "ls -A /usr/local/lib/k8e").split() == [before.strip(), "current", "install.json"]
    machine.run("sh", "-c", f"cp -p /root/kept {file}; cp -p /root/record {record}; rm /root/kept /root/record")


def check_upgrade(machine: PrivateMachine) -> None:
    """By the installed command: pipx or uv have changed the environment that it came from."""
    before = machine.run("readlink", "/usr/local/lib/k8e/current").strip()
    record = machine.run("sh", "-c", f"ls {SOURCE}/lib/python3*/site-packages/k8e-*.dist-info/RECORD").strip()
    machine.run("sh", "-c", f"echo 'k8e/new.txt,,' >> {record}; echo new > $(dirname {record})/../k8e/new.txt")
    report = machine.json("k8e", "doctor", "--fix", "--json")
    done = [step["what"] for step in report["fixed"] if step["done"]]
    assert done == ["install the program in /usr/local/lib/k8e", "the daemon that runs"]
    after = machine.run("readlink", "/usr/local/lib/k8e/current").strip()
    assert after != before
    assert machine.exists(f"/usr/local/lib/k8e/{before}"), "the daemon still uses it"
    machine.run("agentkernel", "daemon", "stop")
    steps = json.loads(machine.run(f"{SOURCE}/bin/python", "-I", "-c", STEPS))
    assert [what for what, done, _ in steps if done] == []
    assert not machine.exists(f"/usr/local/lib/k8e/{before}")
    assert machine.json("k8e", "sandbox", "run", "echo after")["stdout"] == "after\n"


def check_that_it_is_taken_back(machine: PrivateMachine) -> None:
    refused = machine.json("k8e", "uninstall", "--yes", code=1)
    assert refused["code"] == "sessions_live"
    assert json.loads(become(machine, "k8e", "k8e", "uninstall", "--yes", code=1))["code"] == "needs_root"
    unconfirmed = machine.json("k8e", "uninstall", "--with-sessions", code=1)
    assert unconfirmed["code"] == "not_confirmed"
    assert machine.exists("/usr/local/bin/k8e")
    done = machine.json("k8e", "uninstall", "--yes", "--with-sessions")
    assert done["ok"]
    assert any(name.startswith("sandbox ") for name in done["removed"])
    assert {"/usr/local/lib/k8e", "/var/lib/k8e", "the group k8e", str(machine.folder / "s")} <= set(done["removed"])
    assert SOURCE in [each["what"] for each in done["left"]]
    assert machine.json(f"{SOURCE}/bin/k8e", "uninstall", "--yes", code=1)["code"] == "not_installed"


def test_what_is_not_ours_is_left_where_it_is(machine: PrivateMachine) -> None:
    machine.run(
        "sh",
        "-c",
        "mkdir -p /usr/local/share/man/man1; echo mine | tee /usr/local/bin/k8e /usr/local/share/man/man1/k8e.1",
    )
    steps = {
        what: (done, detail)
        for what, done, detail in json.loads(machine.run(f"{SOURCE}/bin/python", "-I", "-c", STEPS))
    }
    assert not steps["put the commands on every user's PATH"][0]
    assert "/usr/local/share/man/man1/k8e.1" in steps["install man pages"][1]
    assert machine.run("cat", "/usr/local/bin/k8e", "/usr/local/share/man/man1/k8e.1") == "mine\nmine\n"
    done = machine.json(f"{SOURCE}/bin/k8e", "uninstall", "--yes", "--keep-state")
    assert str(machine.folder / "s") not in done["removed"]
    assert machine.run("cat", "/usr/local/bin/k8e", "/usr/local/share/man/man1/k8e.1") == "mine\nmine\n"


def test_a_package_that_does_not_exist_does_not_keep_the_others_away(machine: PrivateMachine) -> None:
    code = """
import asyncio
from k8e.engine.local.doctor.fixes import fix
from k8e.engine.local.toolchain.packages import Package
table = [Package("no-such-package-of-k8e", "engine", ("no-such-program",)), Package("hello", "engine", ("hello",))]
async def main():
    return [(step.what, step.done, step.detail, step.packages) async for step in fix(lambda _: True, table=table)]
import json
print(json.dumps([step for step in asyncio.run(main()) if step[0].startswith("install")]))
"""
    done, failed = json.loads(machine.run(f"{SOURCE}/bin/python", "-I", "-c", code))
    assert done == ["install hello", True, "", ["hello"]]
    assert failed[:2] == ["install no-such-package-of-k8e", False]
    assert "no-such-package-of-k8e" in failed[2]
    assert machine.run("hello").startswith("Hello")
