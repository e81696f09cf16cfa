"""The agent and the link: ready time, exec, throughput, memory; in bare namespaces and in gVisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

from bench.samples import Measure, measure_pairs
from devel.sandboxes import Launched, filesystem_arguments, find_runsc, launch_bare, launch_gvisor, scratch_folder
from k8e.link import AgentLink
from k8e.link.dial import UnixDialer
from k8e.link.model import ExecSpec

Launcher = Callable[[], AbstractContextManager[Launched]]
MIB = 1 << 20


@contextlib.asynccontextmanager
async def linked(launcher: Launcher) -> AsyncIterator[tuple[Launched, AgentLink]]:
    with launcher() as launched:
        async with await AgentLink.open(UnixDialer(launched.socket), instance=launched.instance, deadline=30) as link:
            yield launched, link


async def spawn(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError(f"a baseline failed: {' '.join(argv)}")


async def time_first_words(*argv: str) -> float:
    """Milliseconds until a program has said something. That it ends, and what is cleared away then, is not counted."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    said = await process.stdout.read(1)
    spent = (time.perf_counter() - started) * 1000
    if not said or await process.wait() != 0:
        raise RuntimeError(f"a baseline failed: {' '.join(argv)}")
    return spent


async def measure_ready(launcher: Launcher, where: str, count: int) -> Measure:
    async def ready() -> float:
        started = time.perf_counter()
        with launcher() as launched:
            link = await AgentLink.open(UnixDialer(launched.socket), instance=launched.instance, deadline=30)
            spent = time.perf_counter() - started
            await link.close()
        return spent * 1000  # without the end of the sandbox

    async def bare_bwrap() -> float:
        with scratch_folder() as folder:
            arguments = filesystem_arguments(folder)
            started = time.perf_counter()
            namespaces = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net")
            await spawn("bwrap", *namespaces, *arguments, "/usr/bin/true")
            return (time.perf_counter() - started) * 1000

    ours, baseline = [], []
    for _ in range(count):
        ours.append(await ready())
        baseline.append(await bare_bwrap())
    return Measure(f"{where}: agent ready", "ms", tuple(ours), "bwrap ... true", tuple(baseline))


async def measure_exec(link: AgentLink, where: str, count: int) -> Measure:
    spec = ExecSpec.of("/usr/bin/true", stdin=False)

    async def ours() -> None:
        outcome = await (await link.start(spec)).wait()
        assert outcome.exit_code == 0

    async def fork_and_exec() -> None:
        await spawn("/usr/bin/true")

    samples = await measure_pairs(count, ours, fork_and_exec)
    return Measure(f"{where}: exec true", "ms", samples[0], "asyncio fork+exec true", samples[1])


async def measure_stdout(link: AgentLink, where: str, size: int, count: int) -> Measure:
    """The reader is this Python in both cases."""
    argv = ("/usr/bin/head", "-c", str(size), "/dev/zero")

    async def ours() -> float:
        started = time.perf_counter()
        process = await link.start(ExecSpec.of(*argv, stdin=False, window=MIB))
        received = 0
        while chunk := await process.stdout.read():
            received += len(chunk)
        await process.wait()
        assert received == size
        return size / MIB / (time.perf_counter() - started)

    def bare_pipe() -> float:
        started = time.perf_counter()
        received = 0
        with subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(MIB):
                received += len(chunk)
        assert received == size
        return size / MIB / (time.perf_counter() - started)

    taken = [(await ours(), await asyncio.to_thread(bare_pipe)) for _ in range(count)]
    ours_all, baseline = zip(*taken, strict=True)
    return Measure(f"{where}: stdout", "MiB/s", ours_all, "the same through a bare pipe", baseline, better="more")


async def measure_files(link: AgentLink, where: str, size: int, count: int) -> list[Measure]:
    content = os.urandom(MIB) * (size // MIB)
    written, read, copied = [], [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = Path(folder, "source")
        await asyncio.to_thread(source.write_bytes, content)
        for _ in range(count):
            started = time.perf_counter()
            await link.write_file(b"/workspace/bench", content)
            written.append(size / MIB / (time.perf_counter() - started))
            started = time.perf_counter()
            back = await link.read_file(b"/workspace/bench", limit=size)
            read.append(size / MIB / (time.perf_counter() - started))
            assert back == content
            started = time.perf_counter()
            await spawn("cp", str(source), f"{folder}/copy")
            copied.append(size / MIB / (time.perf_counter() - started))
    baseline = "cp on a tmpfs"
    return [
        Measure(f"{where}: file write", "MiB/s", tuple(written), baseline, tuple(copied), better="more"),
        Measure(f"{where}: file read", "MiB/s", tuple(read), baseline, tuple(copied), better="more"),
    ]


def resident_kib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    raise RuntimeError(f"no VmRSS for {pid}")


async def measure_agent(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    scale = 1 if quick else 4
    places: list[tuple[str, Launcher]] = [("namespaces", launch_bare)]
    if find_runsc():
        places.append(("gVisor", launch_gvisor))
    for where, launcher in places:
        yield await measure_ready(launcher, where, 5 * scale)
        async with linked(launcher) as (launched, link):
            if launched.agent_pid:
                idle = (resident_kib(launched.agent_pid),)
                yield Measure(f"{where}: agent resident, idle", "KiB", idle)
            yield await measure_exec(link, where, 50 * scale)
            yield await measure_stdout(link, where, 256 * MIB, 2 * scale)
            for measure in await measure_files(link, where, 64 * MIB, 2 * scale):
                yield measure
