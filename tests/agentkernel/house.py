"""A user with a home and a project, who types `agentkernel`."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.machine import K8E, Done, Machine

AGENTKERNEL = K8E.with_name("agentkernel")


@dataclass
class House(Machine):
    @property
    def project(self) -> Path:
        folder = self.home / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write(self, name: str, content: str = "") -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def ak(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bytes = b"",
        timeout: float = 120,
    ) -> Done:
        done = subprocess.run(
            [AGENTKERNEL, *words],
            input=stdin,
            capture_output=True,
            env={**self.env, **(env or {})},
            timeout=timeout,
            cwd=cwd or self.project,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, **settings: Any) -> str:
        """Runs it, expects success, and returns what it prints."""
        done = self.ak(*words, **settings)
        assert done.code == 0, done
        return done.stdout.decode()

    def object(self, *words: str, **settings: Any) -> Any:
        return json.loads(self.ok(*words, "--json", **settings))

    def refusal(self, *words: str, **settings: Any) -> str:
        """Runs it, expects failure, and returns stderr; stdout is for results."""
        done = self.ak(*words, **settings)
        assert done.code in (1, 125), done
        assert done.stdout == b"", done
        return done.stderr.decode()


def list_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else b"-"
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, path)
