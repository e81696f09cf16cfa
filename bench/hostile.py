"""Measures what a hostile session costs a quiet one: `true` beside a sandbox that has its name server admit addresses
without end, compared with the same session alone, taken in turn.

The hostile one has a wildcard on its list, and the name server of that domain is its friend: every question is for
another name, and every answer has sixteen new addresses, to be admitted for an hour. It asks a few
times as often as it may. Nothing leaves the machine: the name server is on its loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bench.creates import COLD
from bench.crowd import execute
from bench.daemon import Daemon, serving
from bench.samples import Measure

DOMAIN = "wild.test"
# Reads no more of a question than it has to, so that it is not what is measured.
NAME_SERVER = """
import random, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind((sys.argv[1], 53))
    print("ready", flush=True)
    while True:
        query, peer = server.recvfrom(4096)
        end = query.index(bytes(1), 12) + 5
        kind = query[end - 4 : end - 2]
        count = 16 if kind == bytes((0, 1)) else 0
        reply = query[:2] + struct.pack("!HHHHH", 0x8180, 1, count, 0, 0) + query[12:end]
        for _ in range(count):
            reply += struct.pack("!HHHIH", 0xC00C, 1, 1, 3600, 4) + bytes((45,)) + random.randbytes(3)
        server.sendto(reply, peer)
"""
FLOOD = """
import socket, struct, time
server = open("/etc/resolv.conf").read().split()[1]
def question(number):
    label = b"n%d" % number
    name = bytes([len(label)]) + label + b"\\x04wild\\x04test" + bytes(1)
    return struct.pack("!HHHHHH", number & 0xFFFF, 256, 1, 0, 0, 0) + name + struct.pack("!HH", 1, 1)
number, start = time.time_ns() >> 20, time.monotonic()
sent = 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.setblocking(False)
    while True:
        while sent < (time.monotonic() - start) * 1000:
            number, sent = number + 1, sent + 1
            try:
                client.sendto(question(number), (server, 53))
                client.recv(4096)
            except OSError:
                pass
        time.sleep(0.01)
"""


@contextlib.contextmanager
def name_server(address: str) -> Iterator[None]:
    words = [sys.executable, "-c", NAME_SERVER, address]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


async def measure_beside(daemon: Daemon, runtime: str, rounds: int, count: int) -> Measure:
    quiet = await daemon.create(runtime)
    hostile = await daemon.create(runtime, allowed_hosts=[f"*.{DOMAIN}"])
    alone: list[float] = []
    beside: list[float] = []
    await execute(daemon, quiet)
    for _ in range(rounds):
        alone += [await execute(daemon, quiet) for _ in range(count)]
        run = await daemon.call(
            "POST",
            f"/v1/sessions/{hostile}/runs",
            {"code": FLOOD, "language": "python", "background": True, "timeout": 600},
        )
        await asyncio.sleep(3)  # until its addresses are as many as there can be
        beside += [await execute(daemon, quiet) for _ in range(count)]
        await daemon.call("POST", f"/v1/runs/{run['run_id']}/kill", {})
        await asyncio.sleep(1)
    for session in (quiet, hostile):
        await daemon.destroy(session)
    return Measure(f"{runtime}: exec true beside a hostile session", "ms", tuple(beside), "alone", tuple(alone))


async def measure_hostile(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    address = f"127.53.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
    with name_server(address):
        settings = f'{COLD}[egress]\nnameservers = ["{address}"]\n'
        async with serving(scratch / "hostile", settings) as daemon:
            for runtime in await daemon.runtimes():
                yield await measure_beside(daemon, runtime, 2 if quick else 5, 30)
