"""The plan of addresses: everything about a wire follows from its number, and no two wires share anything."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import BLOCK, MAX_WIRES, Pool, overlap
from k8e.policy import AddressKind, kind_of

POOLS = st.builds(
    Pool,
    st.integers(8, 27).map(lambda length: IPv4Network((10 << 24, length))),
    st.one_of(st.none(), st.integers(32, 123).map(lambda length: IPv6Network((0xFD << 120, length)))),
)


@given(POOLS, st.data())
def test_wires_share_nothing(pool: Pool, data: st.DataObject) -> None:
    numbers = st.integers(0, pool.wires - 1)
    one, other = pool.wire(data.draw(numbers)), pool.wire(data.draw(numbers))
    if one.index == other.index:
        assert one == other
        return
    for name in ("interface", "host_mac", "inner_mac", "mark_range"):
        assert getattr(one, name) != getattr(other, name)
    mine, others = ({*wire.host_addresses, *wire.inner_addresses} for wire in (one, other))
    assert not mine & others
    assert len(mine) == (2 if pool.v6 is None else 4)
    assert one.host_mac != one.inner_mac


@given(POOLS, st.data())
def test_addresses_are_the_pools_and_two_make_a_network(pool: Pool, data: st.DataObject) -> None:
    wire = pool.wire(data.draw(st.integers(0, pool.wires - 1)))
    assert len(wire.interface) <= 15, "the kernel's limit"
    for host, inner in wire.pairs:
        assert host.ip != inner.ip
        assert host.network == inner.network
        assert host.network.num_addresses == 2
        assert host.ip in (pool.v4 if host.version == 4 else pool.v6 or ())


@given(POOLS, st.data(), st.integers(1, 0xFFFF))
def test_marks_tell_whose_they_are(pool: Pool, data: st.DataObject, number: int) -> None:
    wire = pool.wire(data.draw(st.integers(0, pool.wires - 1)))
    mark = wire.mark(number)
    value, mask = wire.mark_range
    assert 0 < mark < 1 << 32
    assert mark & mask == value
    assert mark & ~mask == number


@given(POOLS, st.data())
def test_a_block_covers_its_wires_and_no_others(pool: Pool, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, pool.blocks - 1))
    networks = pool.block_networks(number)
    wires = pool.block(number)
    assert [wire.index for wire in wires] == list(range(number * BLOCK, number * BLOCK + BLOCK))
    inside = {address for wire in wires for address in (*wire.host_addresses, *wire.inner_addresses)}
    assert sum(network.num_addresses for network in networks) == len(inside)
    assert all(any(address in network for network in networks) for address in inside)
    assert overlap(networks, pool.block_networks(number))
    if number + 1 < pool.blocks:
        assert not overlap(networks, pool.block_networks(number + 1))


def test_the_usual_pool() -> None:
    pool = Pool()
    assert pool.wires == MAX_WIRES
    wire = pool.wire(pool.wires - 1)
    assert {kind_of(address) for address in wire.host_addresses} == {AddressKind.PRIVATE}, "none of the internet's"
    with pytest.raises(ValueError, match="no wire"):
        pool.wire(pool.wires)


@pytest.mark.parametrize("number", [0, 1 << 16, -1])
def test_marks_end_somewhere(number: int) -> None:
    with pytest.raises(ValueError, match="no mark"):
        Pool().wire(3).mark(number)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(EngineError) as raised:
        Pool(IPv4Network("10.0.0.0/28"), None)
    assert raised.value.control == "network pool"
    assert raised.value.hint


def test_networks_of_different_families_do_not_overlap() -> None:
    assert not overlap([IPv4Network("0.0.0.0/0")], [IPv6Network("::/0")])
