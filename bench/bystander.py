"""Measures `true` in a quiet session while everything else happens to the daemon at once, beside the same session
alone, in turn: sessions are created from the pool, which refills, and expire a second later; and another user floods
the daemon with commands of their own.

The quiet session's caller pauses between two commands, as an AI agent does, though shorter. The flood is another
process, of another user (so another payer), with the lowest priority for its own part: its clients would be elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bench.creates import MANY
from bench.crowd import execute
from bench.daemon import Daemon, serving
from bench.samples import Measure

PAUSE = 0.005  # seconds between two commands
EVERY = 0.7  # seconds between two creates
CLIENTS = 20
OTHER_USER = 65534
ROUNDS = 4
# Each client sends one command after the other over a connection of its own, until the process is killed.
FLOOD = """
import asyncio, json, os, sys
path, runtime, clients = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.nice(19)
async def call(stream, target, body):
    reader, writer = stream
    content = json.dumps(body).encode()
    head = "POST " + target + " HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
    writer.write(head.encode() + b"Content-Length: %d\\r\\n\\r\\n" % len(content) + content)
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
    answer = json.loads(await reader.readexactly(int(head.split(b"content-length:")[1].split()[0])))
    assert b" 200 " in head[:20] or b" 201 " in head[:20], answer
    return answer
async def flood(session):
    stream = await asyncio.open_unix_connection(path)
    while True:
        await call(stream, "/v1/sessions/" + session + "/runs", {"argv": ["/usr/bin/true"]})
async def main():
    stream = await asyncio.open_unix_connection(path)
    sessions = [(await call(stream, "/v1/sessions", {"runtime": runtime}))["session_id"] for _ in range(2)]
    print("ready", flush=True)
    await asyncio.gather(*(flood(sessions[number % 2]) for number in range(clients)))
asyncio.run(main())
"""


@contextlib.contextmanager
def flooding(daemon: Daemon, runtime: str) -> Iterator[None]:
    words = ["/usr/bin/python3", "-c", FLOOD, str(daemon.socket), runtime, str(CLIENTS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, user=OTHER_USER, group=OTHER_USER, extra_groups=[]) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the flood did not begin")
            yield
            if process.poll() is not None:
                raise RuntimeError("the flood ended early")
        finally:
            process.kill()


async def create_and_leave(daemon: Daemon, runtime: str) -> None:
    """Creates a session every now and then that is not used, and expires."""
    while True:
        await daemon.create(runtime, ttl=1)
        await asyncio.sleep(EVERY)


@contextlib.asynccontextmanager
async def disturbed(daemon: Daemon, runtime: str) -> AsyncIterator[None]:
    creating = asyncio.create_task(create_and_leave(daemon, runtime))
    try:
        with flooding(daemon, runtime):
            yield
        if creating.done():
            creating.result()
    finally:
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)


async def run_some(daemon: Daemon, session: str, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        await asyncio.sleep(PAUSE)
        taken.append(await execute(daemon, session))
    return taken


async def wait_calm(daemon: Daemon, quiet: str) -> None:
    """Returns when the quiet session is the only one."""
    while True:
        there = [each["session_id"] for each in await daemon.sessions() if each["phase"] != "destroyed"]
        for session in set(there) - {quiet}:
            with contextlib.suppress(Exception):  # it expires at the same moment
                await daemon.destroy(session)
        if there == [quiet]:
            return
        await asyncio.sleep(0.1)


async def measure_bystander(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    count = 50 if quick else 1000 // ROUNDS
    async with serving(scratch / "bystander", MANY) as daemon:
        os.chmod(daemon.socket, 0o666)  # on most machines this is done by the group k8e
        for runtime in await daemon.runtimes():
            quiet = await daemon.create(runtime)
            alone: list[float] = []
            beside: list[float] = []
            await run_some(daemon, quiet, 10)
            for _ in range(2 if quick else ROUNDS):
                alone += await run_some(daemon, quiet, count)
                async with disturbed(daemon, runtime):
                    beside += await run_some(daemon, quiet, count)
                await wait_calm(daemon, quiet)
            await daemon.destroy(quiet)
            name = f"{runtime}: true in a quiet session beside floods, refills and expiries"
            yield Measure(name, "ms", tuple(beside), "alone", tuple(alone))
