"""A user with a home of their own, the programs of AI agents on the PATH, and k8e off it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.machine import K8E, Machine

PATIENCE = 300.0  # for a program of some hundred MiB on a busy machine


@dataclass
class User:
    machine: Machine
    programs: Path
    home: Path

    def __post_init__(self) -> None:
        self.home.mkdir()

    @property
    def project(self) -> Path:
        folder = self.home / "work"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def env(self) -> dict[str, str]:
        """Without a variable of k8e: the entry that is installed must be enough."""
        node = shutil.which("node")
        assert node is not None
        path = f"{self.programs}:{Path(node).parent}:/usr/bin:/bin"
        temporary = self.home / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb"}
        env |= dict.fromkeys(("TMPDIR", "CLAUDE_CODE_TMPDIR"), str(temporary))
        return {**env, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "MCP_TIMEOUT": "120000"}

    def install(self, command: str, *words: str, **more: str) -> Any:
        """Runs one of our installers, and returns what it prints."""
        own = {name: value for name, value in self.machine.env.items() if name.startswith("K8E_")}
        done = self.run([str(K8E.with_name(command)), *words], **own, **more)
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    def run(self, argv: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        """To its end, and the end of all that it has started."""
        with subprocess.Popen(
            argv,
            cwd=self.project,
            env={**self.env, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=PATIENCE)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)
