"""Engines side by side: no two have the same wires, none takes addresses that the machine uses, and the last one out
puts things back."""

from __future__ import annotations

import os
import threading
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import BLOCK, Network, Pool
from k8e.engine.local.network.leases import Leases

POOL = Pool(IPv4Network("10.0.0.0/24"), IPv6Network("fd00::/64"))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def test_an_engine_has_what_it_leased(ledger: Path) -> None:
    one, other = Leases("one", POOL, ledger), Leases("other", POOL, ledger)
    assert one.take_wire("x") is None
    blocks = [one.lease_block([]), other.lease_block([]), one.lease_block([])]
    assert len(set(blocks)) == 3
    assert one.blocks() == sorted((blocks[0], blocks[2]))
    wires = [one.take_wire(f"x{number}") for number in range(2 * BLOCK)]
    assert len(set(wires)) == 2 * BLOCK
    assert {wire // BLOCK for wire in wires if wire is not None} == {blocks[0], blocks[2]}
    assert one.take_wire("more") is None
    assert other.wires() == {}
    assert one.wires_of("x3") == [wires[3]]
    assert wires[3] is not None
    one.release_wire(wires[3])
    assert one.take_wire("again") == wires[3]


def test_one_that_comes_back_finds_what_it_had(ledger: Path) -> None:
    before = Leases("one", POOL, ledger)
    before.lease_block([])
    wire = before.take_wire("x")
    after = Leases("one", POOL, ledger)
    assert (after.blocks(), after.wires()) == (before.blocks(), {wire: "x"})


def test_addresses_that_the_machine_uses_are_left_alone(ledger: Path) -> None:
    leases = Leases("one", POOL, ledger)
    known: list[Network] = [IPv4Network("10.0.0.0/26"), IPv6Network("fd00::40/122"), IPv4Network("192.0.2.0/24")]
    block = leases.lease_block(known)
    assert not any(net.overlaps(IPv4Network("10.0.0.0/26")) for net in POOL.block_networks(block) if net.version == 4)
    assert not any(net.overlaps(IPv6Network("fd00::40/122")) for net in POOL.block_networks(block) if net.version == 6)
    with pytest.raises(EngineError) as raised:
        leases.lease_block([IPv4Network("10.0.0.0/8")])
    assert raised.value.control == "network pool"
    assert "pool4" in raised.value.hint


def test_pools_that_overlap_do_not_meet(ledger: Path) -> None:
    one = Leases("one", POOL, ledger)
    one.lease_block([])
    other_pool = Pool(IPv4Network("10.0.0.0/16"), None)
    other = Leases("other", other_pool, ledger)
    block = other.lease_block([])
    assert not any(
        mine.overlaps(theirs)
        for mine in POOL.block_networks(one.blocks()[0])
        for theirs in other_pool.block_networks(block)
        if mine.version == theirs.version
    )


def test_a_pool_that_is_used_up_says_so(ledger: Path) -> None:
    leases = Leases("one", POOL, ledger)
    for _ in range(POOL.blocks):
        leases.lease_block([])
    with pytest.raises(EngineError, match="no addresses are left"):
        leases.lease_block([])


def test_the_last_one_out_puts_things_back(ledger: Path) -> None:
    one, other = Leases("one", POOL, ledger), Leases("other", POOL, ledger)
    last: list[str] = []
    one.lease_block([])
    other.lease_block([])
    wire = one.take_wire("x")
    assert not one.release_blocks(lambda: last.append("one")), "it has a sandbox"
    assert wire is not None
    one.release_wire(wire)
    assert one.release_blocks(lambda: last.append("one"))
    assert last == []
    assert other.release_blocks(lambda: last.append("other"))
    assert last == ["other"]
    assert not ledger.exists()
    one.lease_block([])
    assert one.blocks() == [0]


def test_many_at_once_share_nothing(ledger: Path) -> None:
    """Coming and going, so that also the ledger itself is made and removed under their feet."""
    taken: list[int] = []
    failures: list[BaseException] = []
    pool = Pool()

    def live(name: str) -> None:
        try:
            leases = Leases(name, pool, ledger)
            for turn in range(15):
                leases.lease_block([])
                wire = leases.take_wire(f"{name}-{turn}")
                assert wire is not None
                mine = (ledger / f"wire-{wire}").readlink()
                assert os.fspath(mine) == f"{name} {name}-{turn}"
                taken.append(wire)
                leases.release_wire(wire)
                assert leases.release_blocks(lambda: None)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=live, args=(f"engine{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(taken) == 8 * 15
    assert not ledger.exists()
