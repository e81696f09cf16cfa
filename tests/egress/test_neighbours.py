"""Sandboxes reach neither the machine they are on nor one another, on any list."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from k8e.link.model import AGENT, ExecOptions
from tests.egress.internet import HOST4, HOST6
from tests.egress.rig import Cell, Site
from tests.engine.rig import ROOT

pytestmark = pytest.mark.anyio

EVERYTHING = [f"{block}{port}" for block in ("0.0.0.0/0", "[::/0]") for port in ("", ":50051", ":8811", ":22")]
PORTS = (80, 443, 50051, 8811, 22)
WHO: dict[str, ExecOptions] = {
    "user": {}, "root": {"identity": ROOT}, "agent": {"identity": AGENT, "keep_capabilities": True}
}  # fmt: skip


class Services:
    """On every address of the machine, on the ports that lists open and those of the gateway. Counts visits."""

    def __init__(self) -> None:
        self.visits = 0
        self._listeners = [
            socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) for port in PORTS
        ]
        self._datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self._datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._datagrams.bind(("::", 5000))
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self._listeners]
        self._threads.append(threading.Thread(target=self._receive))
        for thread in self._threads:
            thread.start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def _receive(self) -> None:
        while self._datagrams.recv(100) != b"end":
            self.visits += 1

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", ("127.0.0.1", 5000))
        for thread in self._threads:
            thread.join()
        for one in (*self._listeners, self._datagrams):
            one.close()


@pytest.fixture
def services(site: Site) -> Iterator[Services]:
    services = Services()
    yield services
    services.close()


@pytest.fixture(scope="module")
async def cells(site: Site) -> AsyncIterator[tuple[Cell, Cell]]:
    async with site.cell(*EVERYTHING) as one, site.cell(*EVERYTHING) as other:
        yield one, other


def machine_addresses() -> list[str]:
    """Of every interface, the sandboxes' wires included."""
    links = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    return [
        address["local"] for link in links for address in link["addr_info"] if address["scope"] in ("global", "host")
    ]


async def sandbox_addresses(cell: Cell) -> list[str]:
    """The sandbox's own, as it would use them itself. Asking which leads somewhere sends nothing."""
    code = """
import socket
for family, target in ((socket.AF_INET, "45.90.31.1"), (socket.AF_INET6, "2a0b:4340:31::1")):
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 80))
        print(probe.getsockname()[0])
"""
    done = await cell.room.python(code)
    assert done.outcome.exit_code == 0, done
    return done.stdout.decode().split()


@pytest.mark.parametrize("who", WHO)
async def test_services_of_the_machine(cells: tuple[Cell, Cell], services: Services, who: str) -> None:
    cell, _ = cells
    addresses = machine_addresses()
    assert {HOST4, HOST6, "127.0.0.1", "::1"} <= set(addresses)
    assert len(addresses) >= 8, "the wires of two sandboxes have addresses on the machine"
    for address in addresses:
        with socket.create_connection((address, 50051), timeout=20) as control:
            assert control.recv(1) == b""
    assert services.visits == len(addresses), "the machine itself reaches them"
    places = [address for address in addresses if address not in ("127.0.0.1", "::1")]
    attempts = [("tcp", address, port) for address in (*places, "127.0.0.1", "::1") for port in PORTS]
    attempts += [("mapped", f"::ffff:{HOST4}", 443), ("mapped", "::ffff:127.0.0.1", 443)]
    results = await cell.attempt(*attempts, **WHO[who])
    assert set(results) == {"!ECONNREFUSED"}, dict(zip(attempts, results, strict=True))
    await cell.attempt(*(("datagram", address, 5000) for address in places), **WHO[who])
    assert services.visits == len(addresses)


async def test_that_it_was_the_machine_is_told(cells: tuple[Cell, Cell]) -> None:
    cell, _ = cells
    await cell.refusals()
    await cell.attempt(("tcp", HOST4, 443), ("tcp", HOST6, 50051))
    assert await cell.refused_addresses() == {(HOST4, 443): "machine", (HOST6, 50051): "machine"}


LISTEN = """
import socket, threading
port = 8811
listeners = [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)]
datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
datagrams.bind(("::", 8811))
def serve(listener):
    while True:
        connection, peer = listener.accept()
        print("visit", peer, flush=True)
        connection.close()
def receive():
    while True:
        print("datagram", datagrams.recvfrom(100), flush=True)
for thread in (threading.Thread(target=serve, args=listeners), threading.Thread(target=receive)):
    thread.start()
print("listening", flush=True)
"""


@pytest.mark.parametrize("who", WHO)
async def test_another_sandbox(site: Site, cells: tuple[Cell, Cell], who: str) -> None:
    """Which listens on every address it has, as its root. Not from the machine either: only the link leads in."""
    one, other = cells
    process = await other.room.link.start(other.room.spec("/usr/bin/python3", "-c", LISTEN, identity=ROOT))
    try:
        assert await process.stdout.read() == b"listening\n"
        targets = await sandbox_addresses(other)
        assert not set(targets) & set(await sandbox_addresses(one))
        attempts = [("tcp", address, 8811) for address in targets] + [("mapped", f"::ffff:{targets[0]}", 8811)]
        assert await one.attempt(*attempts, **WHO[who]) == ["!ECONNREFUSED"] * len(attempts)
        await one.attempt(*(("datagram", address, 8811) for address in targets), **WHO[who])
        for address in targets:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, 8811), timeout=20)
        # It does listen: itself it can reach.
        reach = "import socket, sys; socket.create_connection((sys.argv[1], 8811), timeout=20).recv(1)"
        for address in (*targets, "127.0.0.1"):
            done = await other.room.python(reach, address)
            assert done.outcome.exit_code == 0, done
        # Those were all that it heard of, each in its turn.
        visits = b""
        while visits.count(b"\n") < len(targets) + 1:
            visits += await process.stdout.read()
        assert visits.count(b"visit") == len(targets) + 1, visits
    finally:
        await process.signal(9)
        process.discard()
        await process.wait()


async def test_the_other_sandbox_is_told_as_such(cells: tuple[Cell, Cell]) -> None:
    one, other = cells
    await one.refusals()
    address, *_ = await sandbox_addresses(other)
    await one.attempt(("tcp", address, 443))
    assert await one.refused_addresses() == {(address, 443): "other_sandbox"}
