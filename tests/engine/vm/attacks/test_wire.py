"""A guest whose kernel is the attacker's, or a VMM that was taken over: it puts on its wire whatever it likes. The
frames are written to the VMM's own descriptor of the tap, while the VMM is stopped; nothing inside has a part in it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from k8e.engine.local.network.addresses import Wire
from tests.egress.internet import GATEWAY4, HOST4, HOST6, UPLINK, Internet
from tests.egress.rig import Cell, Site
from tests.engine.vm.attacks import frames
from tests.engine.vm.conftest import on_its_day

pytestmark = on_its_day(2)
OPEN4, SHUT4, OPEN6 = "45.90.40.1", "45.90.66.6", "2a0b:4340:40::1"
TAP = 3  # its descriptor in the VMM (bundle.py)
PIDFD_GETFD = 438
MAKE_PERSISTENT, GET_HEADER_SIZE = 0x400454CB, 0x800454D7
STRANGER = "02:00:00:00:66:66"


@dataclass(frozen=True, slots=True)
class Attacker:
    cell: Cell
    wire: Wire
    vmm: int
    tap: int  # a copy of its descriptor
    header: bytes  # of virtio, before each frame: nothing is left to do with it

    def send(self, kind: int, body: bytes, *, source: str = "", target: str = "") -> None:
        frame = frames.frame(target or self.wire.host_mac, source or self.wire.inner_mac, kind, body)
        assert os.write(self.tap, self.header + frame) == len(self.header) + len(frame)

    @property
    def internet(self) -> Internet:
        return self.cell.site.internet


def copy_descriptor(pid: int, number: int) -> int:
    handle = os.pidfd_open(pid)
    try:
        copy: int = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, handle, number, 0)
        assert copy >= 0, os.strerror(ctypes.get_errno())
        return copy
    finally:
        os.close(handle)


@contextlib.contextmanager
def take_over(cell: Cell) -> Iterator[Attacker]:
    engine = cell.site.engine
    (vmm,) = engine._cgroups.processes(cell.room.name)
    os.kill(vmm, signal.SIGSTOP)
    tap = copy_descriptor(vmm, TAP)
    try:
        (size,) = struct.unpack("i", fcntl.ioctl(tap, GET_HEADER_SIZE, bytes(4)))
        yield Attacker(cell, engine._network._attachments[cell.room.name].wire, vmm, tap, bytes(size))
    finally:
        os.close(tap)
        os.kill(vmm, signal.SIGCONT)


@pytest.fixture(scope="module")
async def attacker(site: Site) -> AsyncIterator[Attacker]:
    """It may reach some addresses; another sandbox may reach others."""
    async with site.cell(f"{OPEN4}", f"{OPEN6}") as cell:
        with take_over(cell) as attacker:
            yield attacker
        assert await cell.reached(("tcp", OPEN4, 80), ("tcp", OPEN6, 80)) == [OPEN4, OPEN6], "it goes on as before"


def ask_ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def list_connections() -> str:
    """TCP, in every state: one that was begun would be there before a server accepts it."""
    return subprocess.run(["ss", "-Htna"], capture_output=True, text=True, check=True).stdout


def picture() -> list[str]:
    """What the machine knows of its network: addresses, routes, permanent neighbours."""
    return [
        ask_ip("-o", "address"),
        *(ask_ip(family, "route", "show", "table", "all") for family in ("-4", "-6")),
        ask_ip("neigh", "show", "nud", "permanent"),
    ]


def sources(attacker: Attacker) -> list[str]:
    """Addresses that are not its own: its end's other one, the machine's, neighbours', any."""
    wire = attacker.wire
    others = [wire.host4, wire.inner4 + 2, wire.inner4 + 1, wire.host6, wire.inner6 + 2 if wire.inner6 else None]
    fixed = [HOST4, GATEWAY4, HOST6, OPEN4, OPEN6, "127.0.0.1", "::1", "0.0.0.0", "::", "fe80::1", "255.255.255.255"]
    return [*(str(each) for each in others if each is not None), *fixed]


async def test_the_control_a_packet_of_its_own_that_is_allowed_goes_out(attacker: Attacker) -> None:
    attacker.internet.clear()
    attacker.send(*frames.syn(str(attacker.wire.inner4), OPEN4))
    attacker.send(*frames.syn(str(attacker.wire.inner6), OPEN6))
    assert {target for _, target, _ in attacker.internet.notes().packets} == {OPEN4, OPEN6}
    attacker.internet.clear()
    attacker.send(*frames.syn(str(attacker.wire.inner4), SHUT4))
    attacker.send(*frames.datagram(str(attacker.wire.inner4), OPEN4, 443))
    assert attacker.internet.notes().packets == []


async def test_other_addresses_than_its_own_do_not_leave_the_machine(attacker: Attacker) -> None:
    attacker.internet.clear()
    for source in sources(attacker):
        target = OPEN6 if ":" in source else OPEN4
        attacker.send(*frames.syn(source, target))
        attacker.send(*frames.datagram(source, target, 53))
        attacker.send(*frames.syn(source, target), source=STRANGER)
        attacker.send(*frames.syn(source, target), target=frames.BROADCAST)
    notes = attacker.internet.notes()
    assert (notes.packets, notes.questions) == ([], [])


async def test_nor_does_anything_to_the_machine_itself(attacker: Attacker) -> None:
    """Its services by all of its addresses, its loopback included, as if the packets came from itself."""
    with socket.create_server(("::", 8765), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        server.setblocking(False)
        for source in (str(attacker.wire.inner4), *sources(attacker)):
            for target in (HOST4, HOST6, "127.0.0.1", "::1", str(attacker.wire.host4), str(attacker.wire.host6)):
                if (":" in source) == (":" in target):
                    attacker.send(*frames.syn(source, target, 8765))
        states = list_connections()
        assert ":8765" not in states.replace("*:8765", ""), states
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_what_it_says_of_routers_and_neighbours_changes_nothing(attacker: Attacker) -> None:
    before = picture()
    wire = attacker.wire
    own = "fe80::6b:38ff:fe00:1"
    for source in (own, str(wire.inner6), "fe80::1", HOST6):
        attacker.send(*frames.router_advertisement(source, STRANGER, "2a0b:4340:66::"), target=frames.ROUTERS)
        attacker.send(*frames.redirect(source, HOST6, OPEN6))
        for claimed in (source, HOST6, str(wire.host6), str(wire.inner6)):
            attacker.send(*frames.advertisement(claimed, str(wire.host6), STRANGER))
            attacker.send(*frames.solicitation(claimed, str(wire.host6), STRANGER))
    for operation in (1, 2):
        for sender in (str(wire.host4), str(wire.inner4), str(wire.inner4 + 1), HOST4, GATEWAY4, OPEN4):
            for target in (str(wire.host4), sender, HOST4):
                body = frames.arp(operation, STRANGER, sender, target)
                attacker.send(frames.ARP, body, target=frames.BROADCAST)
                attacker.send(frames.ARP, body, source=STRANGER)
    after = picture()
    assert after == before
    known = ask_ip("neigh", "show", "dev", UPLINK)
    assert STRANGER not in known, known


async def test_it_cannot_fill_the_machines_tables_of_neighbours(attacker: Attacker) -> None:
    """Which all interfaces share: when one is full the machine reaches no new neighbour."""
    wire = attacker.wire
    for number in range(3000):
        sender = f"45.91.{number >> 8}.{number & 255}"
        attacker.send(frames.ARP, frames.arp(1, STRANGER, sender, str(wire.host4)), target=frames.BROADCAST)
        attacker.send(*frames.solicitation(f"fe80::66:{number:x}", str(wire.host6), STRANGER))
        attacker.send(*frames.advertisement(f"fe80::67:{number:x}", str(wire.host6), STRANGER))
    known = ask_ip("neigh", "show", "dev", wire.interface).splitlines()
    assert len(known) < 64, known[:10]


async def test_other_kinds_of_frames_are_nothing_to_the_machine(attacker: Attacker) -> None:
    attacker.internet.clear()
    kind, body = frames.syn(str(attacker.wire.inner4), OPEN4)
    for tag in (0x8100, 0x88A8):  # VLANs, with what would be allowed inside, and twice
        inner = b"\0\1" + kind.to_bytes(2, "big") + body
        attacker.send(tag, inner)
        attacker.send(tag, b"\0\0" + tag.to_bytes(2, "big") + inner)
    for other in (0x8847, 0x8864, 0x88CC, 0x88E5, 0x8906, 0x0004, 0x9000):
        attacker.send(other, body)
        attacker.send(other, b"")
    for size in (0, 1, 14, 19, 39):
        attacker.send(frames.IPV4, body[:size])
        attacker.send(frames.IPV6, body[:size])
    inside = frames.syn(str(attacker.wire.inner4), SHUT4)[1]
    for protocol in (4, 41, 47, 50, 51, 132, 137):  # tunnels
        attacker.send(*frames.packet(str(attacker.wire.inner4), OPEN4, protocol, inside))
    assert attacker.internet.notes().packets == []


async def test_a_tap_that_was_made_to_stay_goes_with_its_sandbox(site: Site) -> None:
    """Whoever has its descriptor may ask for that."""
    async with site.cell() as cell:
        with take_over(cell) as attacker:
            fcntl.ioctl(attacker.tap, MAKE_PERSISTENT, 1)
            interface = attacker.wire.interface
    assert interface not in [name for _, name in socket.if_nameindex()]
