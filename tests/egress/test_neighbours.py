"""Sandboxes reach neither the machine they are on nor one another, on any list."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from k8e.link.model import AGENT, ExecOptions
from tests.egress.internet import HOST4, HOST6
from tests.egress.namespaces import run_ip
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


def machine_addresses(*scopes: str) -> list[str]:
    """Of every interface, the sandboxes' wires included."""
    links = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    return [
        address["local"]
        for link in links
        for address in link["addr_info"]
        if address["scope"] in (scopes or ("global", "host"))
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


async def test_the_machine_by_its_link_local_addresses_and_by_shouting(
    cells: tuple[Cell, Cell], services: Services
) -> None:
    """Which are on the same wire, and reached without a router."""
    cell, _ = cells
    scoped = [("scoped", address, 50051) for address in machine_addresses("link")]
    scoped += [("scoped", "fe80::1", 50051), ("scoped", "ff02::1", 50051)]
    for result in await cell.attempt(*scoped, identity=ROOT):
        assert "reached" not in str(result)
    await cell.attempt(
        *(("datagram", address, 5000) for address in ("255.255.255.255", "224.0.0.1", "ff02::1", "ff05::1", "0.0.0.0")),
        identity=ROOT,
    )
    assert services.visits == 0


async def test_a_neighbour_on_the_machines_network_does_not_get_in(site: Site, cells: tuple[Cell, Cell]) -> None:
    """A neighbour that routes the sandboxes' addresses to the machine, as any host on its network can."""
    _, other = cells
    process = await other.room.link.start(other.room.spec("/usr/bin/python3", "-c", LISTEN, identity=ROOT))
    try:
        assert await process.stdout.read() == b"listening\n"
        world = site.internet.process.pid
        for target, gateway in zip(await sandbox_addresses(other), (HOST4, HOST6), strict=True):
            run_ip(*(["-6"] if ":" in target else []), "route", "replace", target, "via", gateway, inside=world)
            knock = f"import socket; socket.create_connection(('{target}', 8811), timeout=20)"
            entered = ["nsenter", f"--net=/proc/{world}/ns/net", sys.executable, "-c", knock]
            done = await asyncio.to_thread(subprocess.run, entered, capture_output=True)
            assert b"ConnectionRefusedError" in done.stderr, done
    finally:
        await process.signal(9)
        process.discard()
        await process.wait()


async def test_the_resolver_of_another_sandbox(site: Site) -> None:
    """Asked by its address, it is one's own that answers, from one's own list."""
    site.internet.publish({"only-one.com": {"A": ["45.90.31.1"]}})
    async with site.cell("only-one.com") as one, site.cell() as other:
        server = (await one.room.output("cat", "/etc/resolv.conf")).split()[1]
        attempts = [("dns", server, ["only-one", "com"], "A", transport) for transport in ("udp", "tcp")]
        assert await one.attempt(*attempts) == [{"rcode": 0, "answers": 1}] * 2
        assert await other.attempt(*attempts) == [{"rcode": 3, "answers": 0}] * 2


@pytest.mark.parametrize("who", WHO)
async def test_somebody_elses_address(site: Site, who: str) -> None:
    """A sandbox that may reach nothing takes the address of one that may, by asking for it or just by using it."""
    async with site.cell("45.90.40.0/24", "2a0b:4340:40::/48") as one, site.cell() as other:
        four, six = await sandbox_addresses(one)
        assert await one.reached(("from", four, "45.90.40.1", 80), ("from", six, "2a0b:4340:40::1", 80)) == [
            "45.90.40.1",
            "2a0b:4340:40::1",
        ]
        site.internet.clear()
        changed = await other.attempt(
            ("configure", "k8e0", four), ("configure", "lo", four), ("netlink", four), **WHO[who]
        )
        used = await other.attempt(
            ("from", four, "45.90.40.1", 80),
            ("from", six, "2a0b:4340:40::1", 80),
            ("tcp", "45.90.40.1", 80),
            **WHO[who],
        )
        assert all(str(each).startswith("!") for each in used), (changed, used)
        assert site.internet.notes().packets == []
        assert await one.reached(("tcp", "45.90.40.2", 80)) == ["45.90.40.2"]  # it still has it
        assert set(changed) <= {"!EPERM", "!EACCES", "!ENOTTY"}, changed


async def test_that_it_was_the_machine_is_told(cells: tuple[Cell, Cell]) -> None:
    cell, _ = cells
    await cell.refusals()
    assert await cell.attempt(("tcp", HOST4, 443), ("tcp", HOST6, 50051)) == ["!ECONNREFUSED"] * 2
    assert await cell.refused_addresses() == {(HOST4, 443): "machine", (HOST6, 50051): "machine"}


async def test_a_sandbox_that_was_quiet_for_a_while_is_still_answered(cells: tuple[Cell, Cell]) -> None:
    """The machine forgets neighbours it did not hear from. It must not need them to answer."""
    cell, _ = cells
    attempts = [("tcp", HOST6, 443), ("tcp", HOST4, 443), ("tcp", "2a0b:4340:40::1", 25), ("tcp", "45.90.40.1", 25)]
    assert await cell.attempt(*attempts) == ["!ECONNREFUSED"] * 4
    for family in ("-4", "-6"):
        run_ip(family, "neigh", "flush", "all")
    assert await cell.attempt(*attempts) == ["!ECONNREFUSED"] * 4
    assert await cell.reached(("tcp", "2a0b:4340:40::1", 80), ("tcp", "45.90.40.1", 80)) == [
        "2a0b:4340:40::1",
        "45.90.40.1",
    ]


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
