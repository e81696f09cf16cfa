"""Output as fast as it comes, through the whole product: agent, link, daemon, socket."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.daemon import Daemon, encode, serving
from bench.samples import Measure

MIB = 1 << 20


async def stream(daemon: Daemon, session: str, size: int) -> float:
    """MiB/s of a live run. Frames are not taken apart: their heads are less than a thousandth."""
    argv = ["/usr/bin/head", "-c", str(size), "/dev/zero"]
    reader, writer = await daemon.connect()
    started = time.perf_counter()
    writer.write(encode("POST", f"/v1/sessions/{session}/runs", {"argv": argv, "stream": True, "timeout": 600}))
    await reader.readuntil(b"\r\n\r\n")
    received = 0
    last = b""
    while not last.endswith(b"\r\n\r\n"):
        piece = await reader.read(MIB)
        if not piece:
            raise RuntimeError("the stream ended early")
        received += len(piece)
        last = piece[-4:]
    spent = time.perf_counter() - started
    writer.close()
    if received < size:
        raise RuntimeError(f"{received} of {size} bytes arrived")
    return size / MIB / spent


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


async def measure_streams(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    size, count = (256 * MIB, 2) if quick else (1024 * MIB, 5)
    async with serving(scratch / "stream") as daemon:
        for runtime in await daemon.runtimes():
            session = await daemon.create(runtime, limits={"cpus": 2.0})
            taken = [
                (await stream(daemon, session, size), await asyncio.to_thread(through_a_pipe, size))
                for _ in range(count)
            ]
            ours, baseline = zip(*taken, strict=True)
            name, other = f"{runtime}: stdout over HTTP", "the same through a bare pipe"
            yield Measure(name, "MiB/s", ours, other, baseline, better="more")
