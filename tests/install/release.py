"""The files of a release, by the real `make release`."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def make_release() -> Path:
    """The folder with the wheel and the standalone program; two files of tests at once take turns."""
    with (ROOT / "build" / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS")}
        done = subprocess.run(["make", "release"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "dist"
