"""A project with a repository, and the machine's own git in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.agentkernel.house import House

CLAUDE = ("--image", "host", "--compatibility-mode", "claude", "--no-network")
PROGRAM = "[core]\n\tfsmonitor = touch OWNED\n"  # which git obeys at `git status`


def git(house: House, *words: str, cwd: Path | None = None) -> str:
    """Runs the machine's git as the user would; it must succeed."""
    done = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *words],
        cwd=cwd or house.project,
        env={"PATH": os.environ["PATH"], "HOME": str(house.home), "GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    return done.stdout


def make_repository(house: House) -> None:
    """With two commits, two files and a folder."""
    git(house, "init", "-q", "-b", "main")
    house.write("README", "hello\n")
    house.write("sub/code.py", "print(1)\n")
    git(house, "add", ".")
    git(house, "commit", "-q", "-m", "first")
    house.write("other/text", "text\n")
    git(house, "add", ".")
    git(house, "commit", "-q", "-m", "second")


def look(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file of a directory, so that any change is seen."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found
