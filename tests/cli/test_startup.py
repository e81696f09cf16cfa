"""A person waits for `k8e sandbox run`: what it imports is what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.machine import K8E, Machine

# What each costs on a small machine is in k8e.cli. `encodings`, `os`, `site` and the like are Python's own start.
CLIENT = {f"k8e.cli.client.{name}" for name in ("http", "response", "streams")}
OURS = {"k8e", "k8e.errors", "k8e.cli", *(f"k8e.cli.{name}" for name in ("client", "process", "run", "state")), *CLIENT}
CHEAP = {"__future__", "_json", "_socket"}


def list_imports(machine: Machine, *words: str) -> set[str]:
    """Beyond what bare Python imports in the same environment."""

    def trace(*command: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *command], env=machine.env, capture_output=True, text=True, input=""
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip() for line in lines}

    return trace(str(K8E), *words) - trace("-c", "pass")


@pytest.mark.parametrize("words", [["true"], ["true", "--raw"], ["--lang", "python", "--timeout", "9", "1"]])
def test_run_imports_next_to_nothing(machine: Machine, words: list[str]) -> None:
    machine.run("true")  # so that the session is there
    assert list_imports(machine, "sandbox", "run", *words) <= OURS | CHEAP


def test_other_commands_load_no_part_of_the_daemon(machine: Machine) -> None:
    imported = list_imports(machine, "sandbox", "sessions")
    assert {name for name in imported if name.startswith("k8e.") and not name.startswith("k8e.cli")} <= {"k8e.errors"}
    assert not imported & {"asyncio", "subprocess", "socket", "typing", "pathlib"}
