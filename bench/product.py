"""The whole product: sessions made cold, commands in them, and the command line; against the bare runtimes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.agent import spawn
from bench.samples import Measure, measure_pairs
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.local import LocalEngine
from k8e.link.model import ExecSpec

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Limits(cpus=float(os.cpu_count() or 1))
TRUE = ExecSpec.of("/usr/bin/true", stdin=False)


async def measure_cold(engine: LocalEngine, runtime: Runtime, scratch: Path, count: int) -> Measure:
    """Create and first command, against the bare runtime running `true` in the same bundle on the same disk."""
    binary = engine.runtime(runtime)
    spec = SandboxSpec(runtime, limits=LIMITS)
    model = f"model-{runtime.value}"
    await engine.create(model, spec)
    config = json.loads((engine.layout.sandbox(model).bundle / "config.json").read_text())
    config["process"]["args"] = ["/usr/bin/true"]
    config["linux"]["cgroupsPath"] += "-baseline"
    bundle = scratch / f"bundle-{runtime.value}"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(config))

    async def bare() -> None:
        name = secrets.token_hex(4)
        await spawn(binary.binary, "--root", str(scratch / "bare"), *binary.flags, "run", "--bundle", str(bundle), name)

    ours, baseline = [], []
    try:
        for number in range(count):
            started = time.perf_counter()
            await engine.create(f"cold-{number}", spec)
            sandbox, _ = await engine.attach(f"cold-{number}")
            await (await sandbox.start(TRUE)).wait()
            ours.append((time.perf_counter() - started) * 1000)
            await engine.destroy(f"cold-{number}")
            started = time.perf_counter()
            await bare()
            baseline.append((time.perf_counter() - started) * 1000)
    finally:
        await engine.destroy(model)
    name = os.path.basename(binary.binary)
    return Measure(
        f"{runtime.value}: create + true, cold", "ms", tuple(ours), f"{name} run, same bundle", tuple(baseline)
    )


async def measure_exec(engine: LocalEngine, runtime: Runtime, count: int) -> Measure:
    await engine.create("exec", SandboxSpec(runtime, limits=LIMITS))
    try:
        sandbox, place = await engine.attach("exec")
        spec = ExecSpec.of("/usr/bin/true", stdin=False, identity=place.user)

        async def ours() -> None:
            await (await sandbox.start(spec)).wait()

        async def fork_and_exec() -> None:
            await spawn("/usr/bin/true")

        samples = await measure_pairs(count, ours, fork_and_exec)
    finally:
        await engine.destroy("exec")
    return Measure(f"{runtime.value}: exec true in a session", "ms", samples[0], "asyncio fork+exec true", samples[1])


def stop_daemon(path: Path) -> None:
    """The one that the first command started: the kernel knows who listens there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(path))
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGTERM)
    select.select([handle], [], [])
    os.close(handle)


async def measure_cli(runtime: Runtime, scratch: Path, count: int) -> Measure:
    environment = os.environ | {
        "HOME": str(scratch / "home"),
        "K8E_STATE_DIR": str(scratch / "state"),
        "K8E_RUN_DIR": str(scratch / "run"),
    }
    k8e = ROOT / ".venv" / "bin" / "k8e"

    def call(*argv: str) -> str:
        done = subprocess.run([str(k8e), *argv], env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    try:
        created = await asyncio.to_thread(call, "sandbox", "create", "--runtime", runtime.value)
        session = json.loads(created)["session_id"]

        async def ours() -> None:
            await asyncio.to_thread(call, "sandbox", "run", "true", "--session-id", session)

        async def bare_python() -> None:
            done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", "pass"], check=True)
            assert done.returncode == 0

        samples = await measure_pairs(count, ours, bare_python)
        await asyncio.to_thread(call, "sandbox", "destroy", session)
    finally:
        stop_daemon(scratch / "run" / "k8e.sock")
    return Measure(f"{runtime.value}: k8e sandbox run true", "ms", samples[0], "python3 -c pass", samples[1])


async def measure_product(quick: bool) -> AsyncIterator[Measure]:
    scale = 1 if quick else 4
    scratch = Path(tempfile.mkdtemp(prefix="k8e-bench-"))
    os.chmod(scratch, 0o711)
    engine = LocalEngine(scratch / "e" / "state", scratch / "e" / "run")
    try:
        (scratch / "e").mkdir(mode=0o711)
        for report in await engine.probe():
            if not report.available:
                continue
            yield await measure_cold(engine, report.runtime, scratch, 5 * scale)
            yield await measure_exec(engine, report.runtime, 50 * scale)
            folder = scratch / f"cli-{report.runtime.value}"
            folder.mkdir(mode=0o711)
            yield await measure_cli(report.runtime, folder, 10 * scale)
    finally:
        for left in await engine.list():
            await engine.destroy(left)
        await engine.close()
        shutil.rmtree(scratch)
