"""Hints of `agentkernel run`: each can be typed as it stands, and is not what was typed already."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cli.agentkernel.advice import advise_on_denial
from k8e.cli.agentkernel.options import CommandOptions
from k8e.cli.agentkernel.plan import Plan
from k8e.profiles.config.file import Config, read_config
from k8e.profiles.options import Context, SandboxOptions
from k8e.profiles.sandbox_policy import build_policy
from tests.agentkernel.house import House
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import Machine
from tests.sandboxes import needs_root

DENIED = {"host": "a.test", "address": "", "port": 0, "reason": "name_not_listed", "hint": "the service's own"}
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with open_machine("native") as machine:
        yield machine


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> House:
    return House(machine.folder, tmp_path)


def plan(options: SandboxOptions, file: Config | None = None) -> Plan:
    others = (file.options,) if file else ()
    return Plan(build_policy(options, Context(cwd="/srv/x"), ("true",), others=others), [], Context(), file)


class TestDenials:
    """Of a run whose sandbox is gone: the next one has to ask for it."""

    def test_a_mode_has_hosts_that_an_option_would_replace(self) -> None:
        hint = advise_on_denial(DENIED, plan(SandboxOptions(mode="claude")), CommandOptions())
        assert "`allow` of [security.domains] in agentkernel.toml adds it" in hint
        assert "--allowed-hosts a.test opens it alone" in hint

    def test_a_file_that_closes_the_network_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        closing = read_config("[security]\n\nnetwork = false\n", "agentkernel.toml")
        hint = advise_on_denial(DENIED, plan(SandboxOptions(), closing), CommandOptions())
        assert hint == "agentkernel.toml:3: security.network closes everything: take it out"
        restrictive = plan(SandboxOptions(profile="restrictive"))
        assert advise_on_denial(DENIED, restrictive, CommandOptions()) == "--allowed-hosts a.test"

    def test_what_no_list_opens_has_no_option(self) -> None:
        denied = {**DENIED, "reason": "metadata"}
        assert advise_on_denial(denied, plan(SandboxOptions()), CommandOptions()) == "the service's own"

    @needs_root
    def test_no_network_is_not_contradicted(self, house: House) -> None:
        done = house.ak("run", "--image", "host", "--no-network", "getent", "hosts", "a.test")
        assert done.code != 0
        hint = "--no-network closes everything: leave it out, or give --allowed-hosts a.test instead of it"
        assert f"denied a.test: name_not_listed; {hint}\n" in done.stderr.decode()

    @needs_root
    @pytest.mark.parametrize(
        ("given", "target", "hint"),
        [
            ("192.0.2.1", "192.0.2.1 8080", "192.0.2.1,192.0.2.1:8080"),  # the port is what was missing
            ("b.test", "192.0.2.1 80", "b.test,192.0.2.1"),  # no name is known
            ("*", "192.0.2.1 80", "'*,192.0.2.1'"),
        ],
    )
    def test_a_list_is_extended_by_what_was_missing(self, house: House, given: str, target: str, hint: str) -> None:
        words = ("run", "--image", "host", "--allowed-hosts", given, "python3", "-c", CONNECT, *target.split())
        done = house.ak(*words)
        said = done.stderr.decode()
        assert done.code == 1
        assert f"; --allowed-hosts {hint}\n" in said
        (option,) = shlex.split(hint)
        house.ok("run", "--image", "host", "--allowed-hosts", option, "--dry-run", "true")

    @needs_root
    def test_a_kept_one_can_be_changed(self, house: House) -> None:
        done = house.ak("run", "--image", "host", "--allowed-hosts", "b.test", "--keep", "getent", "hosts", "a.test")
        said = done.stderr.decode()
        name = said.rpartition("agentkernel sandbox remove ")[2].strip()
        house.ok("sandbox", "remove", name)
        assert f"k8e sandbox allow-hosts {name} --add a.test" in said


@needs_root
class TestPrograms:
    def test_a_script_of_a_folder_that_is_not_mounted(self, house: House) -> None:
        house.write("tool.sh", "#!/bin/sh\necho ran\n").chmod(0o755)
        words = ("--image", "host", "--no-network")
        done = house.ak("run", *words, "./tool.sh")
        assert done.code == 127
        assert "hint: this folder is not in the sandbox: --compatibility-mode claude" in done.stderr.decode()
        assert house.ok("run", *words, "--compatibility-mode", "claude", "./tool.sh") == "ran\n"
        done = house.ak("run", *words, "--profile", "restrictive", "./tool.sh")
        assert "hint: this folder is not in the sandbox: the profile restrictive mounts none" in done.stderr.decode()

    def test_what_is_nowhere(self, house: House) -> None:
        words = ("run", "--image", "host", "--no-network")
        assert "hint: There is no such file in the sandbox" in house.ak(*words, "./nothing").stderr.decode()
        assert "hint: This image does not have it." in house.ak(*words, "nothing").stderr.decode()
