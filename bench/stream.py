"""Output as fast as it comes, through the whole product: agent, link, daemon, socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.daemon import Daemon, encode, serving
from bench.samples import Measure

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)


def stream(daemon: Daemon, session: str, size: int) -> float:
    """MiB/s of a live run, read as the baseline reads its pipe. Frames are not taken apart: their heads are less than a
    thousandth."""
    argv = ["/usr/bin/head", "-c", str(size), "/dev/zero"]
    request = encode("POST", f"/v1/sessions/{session}/runs", {"argv": argv, "stream": True, "timeout": 600})
    buffer = memoryview(bytearray(MIB))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(daemon.socket))
        started = time.perf_counter()
        connection.sendall(request)
        received = 0
        last = b""
        while not last.endswith(b"\r\n\r\n") or received < size:
            count = connection.recv_into(buffer)
            if not count:
                raise RuntimeError("the stream ended early")
            received += count
            last = (last + bytes(buffer[max(0, count - 4) : count]))[-4:]
        return size / MIB / (time.perf_counter() - started)


async def through_its_own_pipe(daemon: Daemon, session: str, size: int) -> float:
    """From one program to another inside the sandbox: what the runtime's own pipe gives."""
    code = f"s=$(date +%s%N); head -c {size} /dev/zero | cat > /dev/null; echo $(($(date +%s%N) - s))"
    answer = await daemon.run(session, code, "bash", timeout=600)
    return size / MIB / (int(answer["stdout"]) / 1e9)


def through_a_pipe(size: int) -> float:
    started = time.perf_counter()
    received = 0
    argv = ("/usr/bin/head", "-c", str(size), "/dev/zero")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read(MIB):
            received += len(chunk)
    assert received == size
    return size / MIB / (time.perf_counter() - started)


async def measure_size(daemon: Daemon, session: str, runtime: str, size: int, count: int) -> Measure:
    """How long a command with that much output takes, whatever it takes to start it included."""
    ours, bare = [], []
    for _ in range(count):
        ours.append(size / MIB / await asyncio.to_thread(stream, daemon, session, size) * 1000)
        bare.append(size / MIB / await asyncio.to_thread(through_a_pipe, size) * 1000)
    name = f"{runtime}: head with {size // KIB} KiB of stdout"
    return Measure(name, "ms", tuple(ours), "the same on the host", tuple(bare))


async def measure_streams(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    size, count = (64 * MIB, 2) if quick else (128 * MIB, 30)
    async with serving(scratch / "stream") as daemon:
        for runtime in await daemon.runtimes():
            session = await daemon.create(runtime, limits={"cpus": 2.0})
            taken = []
            for _ in range(count):
                ours = await asyncio.to_thread(stream, daemon, session, size)
                if runtime == "native":
                    taken.append((ours, await asyncio.to_thread(through_a_pipe, size)))
                else:
                    taken.append((ours, await through_its_own_pipe(daemon, session, size)))
            streamed, baseline = zip(*taken, strict=True)
            other = "the same through a bare pipe" if runtime == "native" else "the same through a pipe inside"
            yield Measure(f"{runtime}: stdout over HTTP", "MiB/s", streamed, other, baseline, better="more")
            for size_of_one in SIZES:
                yield await measure_size(daemon, session, runtime, size_of_one, count)
