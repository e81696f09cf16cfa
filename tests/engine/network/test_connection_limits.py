"""Sandboxes together never fill the machine's table of connections, however many they are and whatever they do."""

from __future__ import annotations

import asyncio
import os
import sys
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine import EngineError
from k8e.engine.local.network import connection_limits
from k8e.engine.local.network import machine as machine_module
from k8e.engine.local.network.addresses import BLOCK, MAX_WIRES, Pool
from k8e.engine.local.network.connection_limits import LEAST, ConnectionLimits, read_connection_limits
from k8e.engine.local.network.leases import Leases
from tests.engine.network.rig import Place, open_with
from tests.sandboxes import needs_root

SMALL = 2048  # entries: of a machine whose table the test can fill


@given(st.integers(64, 1 << 26))
def test_shares_never_add_up_to_more_than_half(size: int) -> None:
    machine = ConnectionLimits(size)
    assert sum(wires * share for wires, share in machine.tiers) <= size // 2
    number = 0
    for wires, share in machine.tiers:
        for index in (number, number + wires - 1):
            assert machine.of(index) == share
            assert machine.connections(index) + machine.queries(index) <= share
        number += wires
    assert number == machine.wires >= BLOCK
    assert machine.wires % BLOCK == 0
    assert machine.of(machine.wires) == LEAST
    assert machine.wires <= BLOCK or machine.tiers[-1][1] >= LEAST


def test_on_a_usual_machine() -> None:
    assert ConnectionLimits(1 << 18).tiers == ((16, 2048), (64, 512), (256, 128), (1024, 32))
    assert ConnectionLimits(1 << 16).tiers == ((16, 682), (64, 170), (256, 42))


def test_who_asks_for_more_wires_than_there_is_room_for_is_told_why(tmp_path: Path) -> None:
    leases = Leases("a", Pool(IPv4Network("10.0.0.0/16"), None), tmp_path / "l", ConnectionLimits(8192).wires)
    for _ in range(ConnectionLimits(8192).wires // BLOCK):
        leases.lease_block([])
    with pytest.raises(EngineError) as refused:
        leases.lease_block([])
    assert refused.value.control == "network connections"
    assert "nf_conntrack_max" in refused.value.hint
    assert ConnectionLimits().wires < MAX_WIRES


FILL = """
import socket, sys
count, kept, refused = int(sys.argv[1]), [], 0
for number in range(count):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.settimeout(20)
    try:
        s.connect(("45.90.40.7", 80))
        kept.append(s)
    except ConnectionRefusedError:
        refused += 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for number in range(count):
        sender.sendto(b"x", (f"45.{number >> 16}.{number >> 8 & 255}.{number & 255}", 53))
print(len(kept), refused, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "read_connection_limits", lambda: ConnectionLimits(SMALL))


@needs_root
async def test_many_sandboxes_that_try_to_fill_it_do_not(small_table: None, place: Place) -> None:
    """Sixteen, each with as many connections and questions as it can have. The shares are those of a small table; the
    kernel that holds them is the real one."""
    network = place.network()
    most = ConnectionLimits(SMALL)
    insides = [(await open_with(network, f"x{number}", "45.90.40.0/24"))[1] for number in range(16)]
    before = count_entries()
    running = []
    try:
        for inside in insides:
            process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net={inside}", sys.executable, "-c", FILL, str(most.of(0))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            running.append(process)
        for process in running:
            assert process.stdout is not None
            kept, refused = map(int, (await process.stdout.readline()).split())
            assert kept == most.connections(0), "its share"
            assert refused == most.of(0) - kept, "and nothing more"
        assert {each.reason for each in network.refusals("x0") if each.port == 80} == {"too_many_connections"}
        assert count_entries() - before <= SMALL // 2
        assert count_entries() - before >= 16 * most.connections(0), "the connections are there"
    finally:
        for process in running:
            process.kill()
            await process.wait()
        for number in range(16):
            await network.remove(f"x{number}")
        await network.close()


def count_entries() -> int:
    return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())


@needs_root
def test_the_size_is_the_machines(machine: None) -> None:
    assert read_connection_limits().size == int(connection_limits._SIZE.read_text()) > 0
    assert os.path.exists(connection_limits._SIZE)
