"""The network of sandboxes: what changing a list costs among many, and what the rules cost a connection.

Without runtimes: programs run in the wire's namespace on the machine's own stack, so that what is compared is the wire
and its rules. The other end is in a namespace behind a bare pair of interfaces, which is the baseline: no packet leaves
the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path

from bench.samples import Measure, measure_pairs
from k8e.damage import Damages
from k8e.engine.local.doctor.remote_host import NameServer, RemoteWire, name_server
from k8e.engine.local.network.addresses import MAX_WIRES, Pool, Wire
from k8e.engine.local.network.network import Network
from k8e.engine.local.network.wires import open_wire, remove_wire
from k8e.policy import HostList

PORT = 8000
SERVER = f"""
import socket, threading
def serve(connection):
    with connection:
        while data := connection.recv(1 << 20):
            if data == b"?":
                connection.sendall(b"!")
with socket.create_server(("", {PORT}), backlog=1024) as listener:
    print("ready", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
THROUGHPUT = f"""
import json, socket, sys, time
found, piece = [], bytes(1 << 20)
for _ in range(int(sys.argv[2])):
    with socket.create_connection((sys.argv[1], {PORT})) as connection:
        started = time.perf_counter()
        for _ in range(256):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        found.append(256 / (time.perf_counter() - started))
print(json.dumps(found))
"""
CONNECTIONS = f"""
import json, socket, sys, time
found = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    for _ in range(200):
        with socket.create_connection((sys.argv[1], {PORT})) as connection:
            connection.sendall(b"?")
            connection.recv(1)
    found.append(200 / (time.perf_counter() - started))
print(json.dumps(found))
"""
QUESTIONS = """
import dns.message, dns.query, json, sys, time
found, query = [], dns.message.make_query(sys.argv[4], "A")
for number in range(int(sys.argv[3]) + 1):
    started = time.perf_counter()
    answer = dns.query.udp(query, sys.argv[1], port=int(sys.argv[2]), timeout=20)
    assert answer.answer, answer
    if number:
        found.append((time.perf_counter() - started) * 1000)
print(json.dumps(found))
"""


async def run(namespace: str, code: str, *words: object) -> tuple[float, ...]:
    where = ("nsenter", f"--net={namespace}") if namespace else ()
    process = await asyncio.create_subprocess_exec(
        *(*where, sys.executable, "-c", code, *map(str, words)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, code
    return tuple(json.loads(out))


async def measure_changes(network: Network, counts: list[int]) -> AsyncIterator[Measure]:
    """Measures adding and removing a block of addresses of one list, beside that many others."""
    lists = [HostList.parse(texts) for texts in (["192.0.2.0/24"], ["192.0.2.0/24", "198.51.100.0/24"])]
    alone: tuple[float, ...] = ()
    opened = 0
    for count in counts:
        while opened < count:
            await network.open(f"crowd{opened}", lists[0], "sandbox")
            network.let_go(f"crowd{opened}")
            opened += 1

        async def change() -> None:
            for hosts in lists:
                await network.set_hosts("crowd0", hosts)

        samples = [each / 2 for each in (await measure_pairs(100, change, nothing))[0]]
        alone = alone or tuple(samples)
        many = f"egress: change of a list among {count}"
        yield Measure(many, "ms", tuple(samples), f"among {counts[0]}", alone)
    for number in range(opened):
        await network.remove(f"crowd{number}")


async def nothing() -> None:
    pass


def list_hosts(address: str, count: int) -> HostList:
    """A list of that many entries, the last of which is the address."""
    others = [f"198.{18 + number // 128}.{number % 128}.0/24:443" for number in range(128, 127 + count)]
    return HostList.parse([*others, f"{address}:{PORT}"])


async def measure_rules(
    network: Network, inside: str, remote: Wire, counts: list[int], rounds: int
) -> AsyncIterator[Measure]:
    """Measures what the length of a list costs: a connection, and a change of one entry."""
    first: dict[str, tuple[float, ...]] = {}
    for count in counts:
        lists = [list_hosts(str(remote.inner4), count), list_hosts(str(remote.inner4), count + 1)]

        async def change(lists: list[HostList] = lists) -> None:
            for hosts in lists:
                await network.set_hosts("bench", hosts)

        changes = tuple(each / 2 for each in (await measure_pairs(max(10, rounds), change, nothing))[0])
        first.setdefault("change", changes)
        yield Measure(f"egress: change of a list of {count}", "ms", changes, f"a list of {counts[0]}", first["change"])
        some = await run(inside, CONNECTIONS, str(remote.inner4), rounds)
        connections = tuple(1000 / each for each in some)
        first.setdefault("connection", connections)
        name = f"egress: TCP connection with a list of {count}"
        yield Measure(name, "ms", connections, f"a list of {counts[0]}", first["connection"])


async def measure_wire(
    network: Network, inside: str, wire: Wire, remote: Wire, names: NameServer, count: int
) -> AsyncIterator[Measure]:
    target = str(remote.inner4)
    for name, unit, code, rounds in (
        ("TCP throughput", "MiB/s", THROUGHPUT, count),
        ("TCP connections, one after the other", "per second", CONNECTIONS, count),
    ):
        samples, baseline = await run(inside, code, target, rounds), await run("", code, target, rounds)
        yield Measure(f"egress: {name}", unit, samples, "a bare veth", baseline, "more")
    host = "far-end.k8e-doctor.test"
    questions = 50 * count
    samples = await run(inside, QUESTIONS, wire.host4, 53, questions, host)
    baseline = await run("", QUESTIONS, names.server.address, names.server.port, questions, host)
    yield Measure("egress: a listed name, remembered", "ms", samples, "asking upstream directly", baseline)
    started = time.perf_counter()
    for _ in range(questions):
        network.refusals("bench")
    each = (time.perf_counter() - started) / questions * 1000
    yield Measure("egress: asking for refusals when there are none", "ms", (each,))


async def measure_egress(quick: bool, scratch: Path) -> AsyncIterator[Measure]:
    async with name_server() as names:
        network = Network(
            secrets.token_hex(4),
            lambda sandbox: scratch / f"{sandbox}.json",
            pool=Pool(),
            nameservers=[names.server],
            damages=Damages(scratch),
        )
        try:
            async for measure in measure_changes(network, [1, 50] if quick else [1, 100, 500]):
                yield measure
            remote = RemoteWire(MAX_WIRES - 1, IPv4Address("198.18.0.0"), None)  # of the block that is for benchmarks
            namespace = await asyncio.to_thread(open_wire, remote, "none: the bench's")
            names.address = remote.inner4
            hosts = HostList.parse([f"{remote.inner4}:{PORT}", f"far-end.k8e-doctor.test:{PORT}"])
            wire, inside = await network.open("bench", hosts, "sandbox")
            server = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", sys.executable, "-c", SERVER),
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert server.stdout is not None
                await server.stdout.readline()
                async for measure in measure_wire(network, inside, wire, remote, names, 2 if quick else 30):
                    yield measure
                async for measure in measure_rules(network, inside, remote, [1, 10, 100, 500], 2 if quick else 30):
                    yield measure
            finally:
                server.kill()
                await server.wait()
                os.close(namespace)
                await asyncio.to_thread(remove_wire, remote)
        finally:
            for sandbox in network.sandboxes():
                await network.remove(sandbox)
            await network.close()
