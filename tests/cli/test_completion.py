"""The TAB key, in the real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.machine import DEADLINE, K8E, Machine, wait_until

AGENTKERNEL = K8E.with_name("agentkernel")
PATIENCE = {"K8E_PATIENCE": "60"}  # a person waits two seconds behind the TAB key; these tests, for a busy machine
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--private", "--no-config", "-i"],
}
LOAD = {
    "bash": "source {script}\n",
    "zsh": "autoload -Uz compinit && compinit -u -D && source {script}\n",
    "fish": "source {script}\n",
}


class Shell:
    """An interactive shell in a terminal of its own. What a completed line says is read from a file, so that it does
    not matter how the shell paints its prompt."""

    def __init__(self, machine: Machine, name: str, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._screen, device = os.openpty()
        env = {
            **machine.env,
            **PATIENCE,
            "TERM": "dumb",
            "INPUTRC": "/dev/null",
            "PS1": "$ ",
            "XDG_CONFIG_HOME": str(folder),
        }
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *START[name]], stdin=device, stdout=device, stderr=device, env=env, cwd=machine.home
        )
        os.close(device)
        os.set_blocking(self._screen, False)

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def drain(self) -> bytes:
        """A shell whose screen nobody reads stops."""
        try:
            return os.read(self._screen, 65536)
        except BlockingIOError:
            return b""
        except OSError:
            return b""

    def wait_for(self, path: Path) -> str:
        def there() -> bool:
            self.drain()
            return path.exists() and path.read_text().endswith("\n")

        wait_until(there)
        return path.read_text().strip()

    def load(self, line: str) -> None:
        ready = self._folder / "ready"
        self.type(line)
        self.type(f"echo ready > {ready}\n")
        self.wait_for(ready)

    def complete(self, line: str) -> str:
        """The line as it is after the TAB key: `echo` writes it to a file."""
        self._count += 1
        target = self._folder / f"line-{self._count}"
        self.type(f"{line}\t > {target}\n")
        return self.wait_for(target)

    def close(self) -> None:
        os.close(self._screen)
        self._process.kill()
        self._process.wait(DEADLINE)


def ask(machine: Machine, program: Path, *words: str) -> list[str]:
    command = [str(program), "completion", "words", "--", *words]
    done = subprocess.run(
        command, env={**machine.env, **PATIENCE}, cwd=machine.home, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def test_words_come_from_the_tables(machine: Machine) -> None:
    assert {"sandbox", "doctor", "image"} <= set(ask(machine, K8E, ""))
    assert ask(machine, K8E, "sandbox", "sess") == ["sessions"]
    assert ask(machine, K8E, "sandbox", "run", "--lang", "py") == ["python"]
    assert ask(machine, K8E, "sandbox", "create", "--man") == ["--manifest"]
    assert ask(machine, K8E, "sandbox", "create", "--manifest", "") == [":files"]
    assert ask(machine, K8E, "nonsense", "") == []
    assert ask(machine, AGENTKERNEL, "run", "--profile", "r") == ["restrictive"]
    assert "--shell" in ask(machine, AGENTKERNEL, "attach", "--")
    assert ask(machine, AGENTKERNEL, "sandbox", "st") == ["start", "stop"]


def test_sessions_are_completed_by_their_names(machine: Machine) -> None:
    machine.k8e("sandbox", "create", "--session-id", "completed-one")
    assert ask(machine, K8E, "sandbox", "destroy", "completed-") == ["completed-one"]
    assert ask(machine, K8E, "sandbox", "run", "--session-id", "completed-") == ["completed-one"]


def test_a_tab_starts_no_daemon(lone_machine: Machine) -> None:
    assert ask(lone_machine, K8E, "sandbox", "destroy", "") == []
    assert not (lone_machine.folder / "r" / "k8e.sock").exists()


@pytest.mark.parametrize("name", list(START))
def test_the_real_shell_completes(machine: Machine, tmp_path: Path, name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on this machine")
    machine.k8e("sandbox", "create", "--session-id", f"tab-in-{name}")
    for program in ("k8e", "agentkernel"):
        script = subprocess.run([K8E.with_name(program), "completion", name], capture_output=True, check=True).stdout
        (tmp_path / f"{program}.{name}").write_bytes(script)
    # A function in front of the program writes the words that it gets: what the shell made of the line.
    recorder = tmp_path / "bin"
    recorder.mkdir()
    for program in ("k8e", "agentkernel"):
        target = recorder / program
        target.write_text(
            f'#!/bin/sh\nif [ "$1" = completion ]; then exec {K8E.with_name(program)} "$@"; fi\necho "{program} $*"\n'
        )
        target.chmod(0o755)
    at = Machine(machine.folder, machine.home, {"PATH": f"{recorder}:{machine.env['PATH']}"})
    shell = Shell(at, name, tmp_path)
    try:
        for program in ("k8e", "agentkernel"):
            shell.load(LOAD[name].format(script=tmp_path / f"{program}.{name}"))
        assert shell.complete("k8e sandbox sess") == "k8e sandbox sessions"
        assert shell.complete(f"k8e sandbox destroy tab-in-{name[:2]}") == f"k8e sandbox destroy tab-in-{name}"
        assert shell.complete("agentkernel run --profile restr") == "agentkernel run --profile restrictive"
    finally:
        shell.close()
