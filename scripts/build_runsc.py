"""Builds the pinned runsc (gVisor) where Go is installed, because distributions have old ones (docs/runtimes.md).

    build_runsc.py               build/bin/runsc; as root also into /var/lib/k8e/bin, where the engine finds it
    build_runsc.py --if-possible the same for other verbs: without Go, or after a build that failed, says so and goes on

The version is the one in src/k8e/cluster/pins/gvisor/go.mod, which a cluster of ours has, too; go.sum there fixes the
content of every module that goes into it.
About two minutes on two cores, nothing when it is there already.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE = ROOT / "src" / "k8e" / "cluster" / "pins" / "gvisor"
SCRATCH = ROOT / "build" / "runsc"
BINARY = ROOT / "build" / "bin" / "runsc"
INSTALLED = Path("/var/lib/k8e/bin/runsc")
PACKAGE = "gvisor.dev/gvisor/runsc"


class BuildFailed(Exception):
    pass


def say(text: str) -> None:
    print(f"runsc: {text}", file=sys.stderr, flush=True)


def pinned_version() -> str:
    match = re.search(r"^require gvisor\.dev/gvisor (\S+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise BuildFailed(f"{MODULE / 'go.mod'} does not name a version of gVisor")
    return match[1]


def find_go() -> str | None:
    """Looks also where Go's own installer puts it, which is often not on the PATH of a service."""
    return shutil.which("go") or shutil.which("/usr/local/go/bin/go")


def fingerprint() -> str:
    total = hashlib.sha256()
    for path in (MODULE / "go.mod", MODULE / "go.sum", Path(__file__)):
        total.update(path.read_bytes())
    return total.hexdigest()


def build(go: str, target: Path) -> None:
    version = pinned_version()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    shutil.copytree(MODULE, SCRATCH)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [go, "build", "-trimpath", "-o", str(partial)]
    # Without this it calls itself VERSION_MISSING, and the engine could not tell that it is the newer one.
    command += ["-ldflags", f"-s -w -X {PACKAGE}/version.version={version}", PACKAGE]
    # readonly: a module that is not in go.sum, or is not what go.sum says, ends the build.
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    try:
        done = subprocess.run(
            command, cwd=SCRATCH, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise BuildFailed(f"{go} build ended with {done.returncode}: {done.stderr[-2000:].strip()}")
        told = subprocess.run([partial, "--version"], stdout=subprocess.PIPE, text=True).stdout
        if version not in told:
            raise BuildFailed(f"the built runsc calls itself {told!r}")
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def install(source: Path, target: Path) -> None:
    """Replaces atomically: a daemon may be starting one at this moment. Times tell whether it is there already."""
    status = source.stat()
    if target.exists() and (target.stat().st_size, target.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns):
        return
    # The state directory can be walked through, not listed: native sandboxes' ids have to pass.
    target.parent.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    target.parent.mkdir(mode=0o755, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(source, partial)
        os.chown(partial, 0, 0)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    say(f"installed as {target}; a daemon takes it when it starts the next time")


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def make(if_possible: bool) -> None:
    stamp, failed = BINARY.with_suffix(".stamp"), BINARY.with_suffix(".failed")
    wanted = fingerprint()
    if not BINARY.exists() or read(stamp) != wanted:
        go = find_go()
        if go is None:
            raise BuildFailed("Go is not installed, so the one of the distribution has to do")
        if if_possible and read(failed) == wanted:
            raise BuildFailed("building it failed before; `make runsc` tries again")
        say(f"building {pinned_version()} with {go}: about two minutes the first time, cached in build/bin")
        stamp.unlink(missing_ok=True)
        try:
            build(go, BINARY)
        except BuildFailed:
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(wanted)
            raise
        failed.unlink(missing_ok=True)
        stamp.write_text(wanted)
    if os.geteuid() == 0:
        install(BINARY, INSTALLED)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the pinned runsc")
    parser.add_argument("--if-possible", action="store_true", help="go on when it cannot be built")
    options = parser.parse_args(argv)
    try:
        make(options.if_possible)
    except BuildFailed as error:
        say(str(error))
        return 0 if options.if_possible else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
