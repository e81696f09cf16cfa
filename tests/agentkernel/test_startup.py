"""A person or an agent waits for `agentkernel run`: what it imports is what it costs (k8e.cli says how much)."""

from __future__ import annotations

import subprocess
import sys

from tests.agentkernel.house import AGENTKERNEL
from tests.agentkernel.machine import Kernel

CHEAP = {"__future__", "_json", "_socket", "select", "termios"}


def list_imports(kernel: Kernel, *words: str) -> set[str]:
    """Beyond what bare Python imports in the same environment."""

    def trace(*command: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *command],
            env=kernel.env,
            cwd=kernel.home,
            capture_output=True,
            text=True,
            input="",
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip() for line in lines}

    return trace(str(AGENTKERNEL), *words) - trace("-c", "pass")


def test_run_imports_next_to_nothing(kernel: Kernel) -> None:
    (kernel.home / "package.json").touch()
    imported = list_imports(kernel, "run", "--image", "host", "--profile", "restrictive", "--", "python3", "-c", "1")
    library = {name for name in imported if not name.startswith("k8e")}
    assert library <= CHEAP
    ours = {name for name in imported if name.startswith("k8e")}
    assert {name for name in ours if not name.startswith(("k8e.cli", "k8e.profiles"))} <= {"k8e", "k8e.errors"}
    assert not ours & {
        "k8e.profiles.config.file",
        "k8e.profiles.environment",
        "k8e.profiles.mounts",
        "k8e.profiles.protection",
        "k8e.cli.commands",
    }


def test_the_bridge_of_an_agent_imports_next_to_nothing(kernel: Kernel) -> None:
    imported = list_imports(kernel, "mcp", "server")
    assert not imported & {"argparse", "json", "re", "asyncio", "k8e.cli.commands", "mcp"}
