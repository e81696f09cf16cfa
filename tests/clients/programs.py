"""The programs of AI agents, from the npm registry, in the versions of package-lock.json. They are fetched once for
each lock, to a cache that checkouts and runs share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.machine import ROOT

SHARED = Path("/var/cache/k8e-tests")
HERE = Path(__file__).parent
UNUSED = 30 * 24 * 3600.0  # after which the programs of an earlier lock are removed
FILES = ("package.json", "package-lock.json")
ENVIRONMENT = dict(os.environ)  # with this machine's own npm configuration


def find_cache() -> Path:
    """Below build/ for users who may not write to the shared one."""
    for folder in (SHARED, ROOT / "build"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise AssertionError("no place for the programs of AI agents")


def fetch_programs() -> Path:
    """The directory that has `claude`, `codex` and `gemini`."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]
    cache = find_cache()
    folder = cache / f"clients-{os.uname().machine}-{digest}"
    with open(cache / "clients.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once fetch it once
        if not folder.exists():
            draft = cache / f"{folder.name}.draft"
            shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
            draft.mkdir()
            for name in FILES:
                shutil.copy(HERE / name, draft)
            install(draft)
            draft.rename(folder)
        os.utime(folder)
        for other in cache.glob("clients-*-*"):
            if time.time() - other.stat().st_mtime > UNUSED:
                shutil.rmtree(other)
    return folder / "node_modules" / ".bin"


def install(folder: Path) -> None:
    say(f"fetching the programs of AI agents to {folder}, once")
    argv = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", "--prefer-offline"]
    with open(folder / "npm.log", "w+") as log:
        process = subprocess.Popen(
            argv, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                say(f"npm has fetched {measure(folder) >> 20} MiB")
        finally:
            process.kill()
        log.seek(0)
        assert process.returncode == 0, log.read()


def measure(folder: Path) -> int:
    sizes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # npm moves its files
                continue
    return sizes


def say(line: str) -> None:
    sys.stderr.write(f"k8e: {line}\n")
    sys.stderr.flush()
