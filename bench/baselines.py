"""Baselines: what other tools need for one command in a fresh sandbox, as a whole process.

Installed where the package registries have it; what is not to be had is left out of the table, and said.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ROOT / "build" / "bench"
SANDBOX_RUNTIME = "@anthropic-ai/sandbox-runtime"

# A machine may have mixed cgroups, with which podman's own default fails.
CONTAINERS = """
[containers]
netns = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


@dataclass(frozen=True, slots=True)
class OneShot:
    """A command line that runs `true` in a sandbox that was not there before."""

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None


def run_quietly(*argv: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> bool:
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def install_package(command: str, *packages: str) -> bool:
    if shutil.which(command):
        return True
    say(f"installing {' '.join(packages)}")
    apt = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
    return run_quietly(*apt) and shutil.which(command) is not None


def bubblewrap(*command: str) -> OneShot:
    names = ("bin", "sbin", "lib", "lib64")
    links = [word for name in names if os.path.islink(f"/{name}") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    unshared = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net")
    shape = ("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
    words = command or ("/usr/bin/true",)
    return OneShot(f"bwrap ... {os.path.basename(words[0])}", ("bwrap", *unshared, *shape, *links, *words))


def podman(
    runsc: str | None, command: tuple[str, ...] = ("true",), image: str = "", project: Path | None = None
) -> Iterator[OneShot]:
    """On the machine's own toolchain, or on an image that podman has; with a folder of the machine at /workspace."""
    if not install_package("podman", "podman"):
        say("podman is not to be had here: left out")
        return
    INSTALLED.mkdir(parents=True, exist_ok=True)
    settings = INSTALLED / "containers.conf"
    settings.write_text(CONTAINERS)
    root = INSTALLED / "root"  # the machine's own toolchain, as our image `host` has it
    for name in ("usr", "proc", "dev", "tmp", "run", "etc", "sys"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}") and not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    env = (("CONTAINERS_CONF", str(settings)),)
    # It would raise these, which fails on a machine without CAP_SYS_RESOURCE.
    limits = ("--ulimit", "nproc=1024:1024", "--ulimit", "nofile=1024:1024")
    what = (image,) if image else ("-v", "/usr:/usr:ro", "--rootfs", str(root))
    folder = ("-v", f"{project}:/workspace", "-w", "/workspace") if project else ()
    if project:
        (root / "workspace").mkdir(exist_ok=True)
    flags = ("run", "--rm", "--network=none", *limits, *folder, *what)
    shown = f"{' '.join(command)}{f' in {image}' if image else ''}{' with a folder' if project else ''}"
    for name, runtime in (("runc", shutil.which("runc")), ("runsc", runsc)):
        if runtime is None:
            continue
        shot = OneShot(f"podman run {shown} ({name})", ("podman", f"--runtime={runtime}", *flags, *command), env)
        if works(shot):
            yield shot


def sandbox_runtime() -> Iterator[OneShot]:
    """Anthropic's, from npm: bubblewrap with a proxy for the network."""
    for command, package in (("socat", "socat"), ("rg", "ripgrep"), ("bwrap", "bubblewrap")):
        install_package(command, package)
    folder = INSTALLED / "srt"
    script = folder / "node_modules" / ".bin" / "srt"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"installing {SANDBOX_RUNTIME}")
        if not run_quietly("npm", "install", "--no-audit", "--no-fund", "--silent", SANDBOX_RUNTIME, cwd=folder):
            say(f"{SANDBOX_RUNTIME} is not to be had here: left out")
            return
    settings = folder / "settings.json"
    network: dict[str, list[str]] = {"allowedDomains": [], "deniedDomains": []}
    files: dict[str, list[str]] = {"denyRead": [], "allowWrite": ["/tmp"], "denyWrite": []}
    settings.write_text(json.dumps({"network": network, "filesystem": files}))
    shot = OneShot("sandbox-runtime true", (str(script), "--settings", str(settings), "true"))
    if works(shot):
        yield shot


def works(shot: OneShot) -> bool:
    if run_quietly(*shot.argv, env=os.environ | dict(shot.env)):
        return True
    say(f"{shot.name} does not work here: left out")
    return False
