"""`agentkernel run` as a whole process, in a fresh sandbox each time, next to podman with the same content: the
machine's own tools, and an OCI image that both have. Warm: from the pool, with a pause in which it is filled again, as
agents make one. Cold: without a pool. podman's `--rm` waits until its container is gone: so do we, and what a caller
waits for is a measure of its own."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.baselines import OneShot, podman, run_quietly, say
from bench.daemon import Daemon, serving
from bench.oneshot import BARE, take
from bench.programs import install_program
from bench.samples import Measure
from k8e.engine.local.runtime.runtime import OWN_BINARIES

BUSYBOX = Path("/bin/busybox")  # Debian's busybox-static
IMAGE = "localhost/k8e-bench:1"
COMMANDS = (("true",), ("python3", "-c", "print(1)"))
POOL = "[pool]\nmin = 2\n"
NO_POOL = "[pool]\nenabled = false\n"


async def measure_agentkernel(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 8 if quick else 30
    own = OWN_BINARIES / "runsc"
    runsc = str(own) if own.exists() else None
    rivals = {command: tuple(podman(runsc, command)) for command in COMMANDS}
    archive = make_image(scratch)
    boxed = tuple(podman(runsc, ("true",), IMAGE)) if archive and run_quietly("podman", "load", "-i", archive) else ()
    project = scratch / "project"
    (project / ".git").mkdir(parents=True)
    mounted = tuple(podman(runsc, ("true",), project=project))
    for name, settings, pause in (("warm", POOL, 1.2), ("cold", NO_POOL, 0.0)):
        async with serving(scratch / name, settings) as daemon:
            for command in COMMANDS:
                ours = shot(daemon, f"agentkernel run {' '.join(command)}, {name}", "host", command)
                async for measure in compare(daemon, ours, rivals[command] if name == "cold" else (), count, pause):
                    yield measure
            if name == "warm":  # what `daemon prewarm --mode claude` asks for, with the machine's own tools
                await daemon.call("POST", "/v1/pool", {"name": "claude", "count": 2, "slots": ["/workspace"]})
            ours = shot(daemon, f"agentkernel run --compatibility-mode claude true, {name}", "host", ("true",), project)
            async for measure in compare(daemon, ours, mounted if name == "cold" else (), count, pause):
                yield measure
            if archive and load_image(daemon, archive):
                ours = shot(daemon, f"agentkernel run --image busybox true, {name}", IMAGE, ("true",))
                async for measure in compare(daemon, ours, boxed if name == "cold" else (), count, pause):
                    yield measure
    run_quietly("podman", "rmi", "-f", IMAGE)


def shot(daemon: Daemon, name: str, image: str, command: tuple[str, ...], project: Path | None = None) -> OneShot:
    changed = tuple((key, value) for key, value in daemon.environment.items() if os.environ.get(key) != value)
    mode = ("--compatibility-mode", "claude") if project else ()
    words = (install_program("agentkernel"), "run", "--no-network", *mode, "--image", image, *command)
    return OneShot(name, words, changed, os.fspath(project) if project else None)


async def compare(
    daemon: Daemon, ours: OneShot, others: Sequence[OneShot], count: int, pause: float
) -> AsyncIterator[Measure]:
    """All in turn, so that a noisy moment hits all alike; the first rounds, in which a pool learns, do not count. Where
    podman with the same runtime is there, it is the baseline."""
    shots = (BARE, ours, *others)
    taken: dict[str, list[float]] = {each.name: [] for each in shots}
    ended: list[float] = []
    for number in range(count + 2):
        await asyncio.sleep(pause)
        for each in shots:
            started = time.perf_counter()
            spent = await asyncio.to_thread(take, each)
            if each is ours:
                await daemon.wait_ended()
            whole = (time.perf_counter() - started) * 1000
            if number > 1:
                taken[each.name].append(spent)
                if each is ours:
                    ended.append(whole)
    for each in shots[1:]:
        yield Measure(each.name, "ms", tuple(taken[each.name]), BARE.name, tuple(taken[BARE.name]))
    rival = next((each.name for each in others if each.name.endswith("(runsc)")), "")
    name = f"{ours.name}, and its sandbox gone"
    yield Measure(name, "ms", tuple(ended), rival, tuple(taken[rival]) if rival else ())


def make_image(scratch: Path) -> str:
    """An archive as `docker save` writes it, with busybox in it and nothing else; empty: there is no busybox here."""
    if not BUSYBOX.exists():
        say("there is no busybox here: no image")
        return ""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(BUSYBOX.resolve(), "bin/busybox")
        for name in ("sh", "true"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for name in ("etc", "tmp", "proc", "dev", "sys", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
    return str(write_archive(scratch / "image.tar", layer.getvalue()))


def write_archive(path: Path, layer: bytes) -> Path:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    settings = {"Env": ["PATH=/bin"], "Cmd": ["sh"]}
    root = {"type": "layers", "diff_ids": [digest]}
    config = json.dumps({"architecture": machine, "os": "linux", "config": settings, "rootfs": root}).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]).encode()
    parts = {"layer.tar": layer, "config.json": config, "manifest.json": manifest}
    with tarfile.open(path, "w") as tar:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def load_image(daemon: Daemon, archive: str) -> bool:
    words = [str(Path(sys.executable).with_name("k8e")), "image", "import", "--name", IMAGE, archive]
    done = subprocess.run(words, env=daemon.environment, capture_output=True, check=False)
    if done.returncode != 0:
        say(f"the image cannot be imported: {done.stdout.decode(errors='replace')}")
    return done.returncode == 0
