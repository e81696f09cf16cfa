"""The table in the kernel: what nft makes of the rules, and that elements which we encode are those that nft would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import BLOCK, Pool, Wire
from k8e.engine.local.network.netlink.elements import (
    Element,
    add_elements,
    delete_elements,
    every_element,
    flush_set,
    live_element,
    name_element,
    range_element,
    read_mark,
    read_target,
)
from k8e.engine.local.network.netlink.messages import NetlinkError, NoSuchThing
from k8e.engine.local.network.rules import build_table, build_wires, wire_sets
from k8e.engine.local.network.table import Table, run_nft
from k8e.policy import FORBIDDEN, GLOBAL, Address

pytestmark = pytest.mark.usefixtures("machine")
POOL = Pool()
WIRE = POOL.wire(3)


def nft(*words: str) -> str:
    done = subprocess.run(["nft", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(table: Table, name: str, kind: str) -> list[Any]:
    """As nft tells them, without the time that is left."""
    listed = json.loads(nft("-j", "list", kind, "inet", table.name, name))["nftables"]
    elements = next(each[kind] for each in listed if kind in each).get("elem", [])
    return sorted((_without_time(element) for element in elements), key=json.dumps)


def _without_time(element: Any) -> Any:
    if isinstance(element, list):
        return [_without_time(each) for each in element]
    if isinstance(element, dict):
        return {key: _without_time(value) for key, value in element.items() if key != "expires"}
    return element


@pytest.fixture
def table(machine: None) -> Iterator[Table]:
    table = Table("k8e_test")
    table.replace(POOL.block(0))
    yield table
    table.close()


def test_it_is_there_or_not(table: Table) -> None:
    assert table.is_current()
    assert table.wires() == {wire.interface for wire in POOL.block(0)}
    table.remove()
    assert not table.is_current()
    table.remove()


def test_rules_that_another_edition_made_are_replaced(machine: None) -> None:
    nft("add", "table", "inet", "k8e_test")
    table = Table("k8e_test")
    assert not table.is_current()
    table.replace([])
    assert table.is_current()
    table.close()


def test_replacing_removes_what_was_open(table: Table) -> None:
    table.commit(add_elements(table.name, "live", [live_element(WIRE.mark(1))]))
    table.replace(POOL.block(0))
    assert table.elements("live") == []


def test_wires_are_added_without_touching_others(table: Table) -> None:
    table.commit(
        add_elements(table.name, "names4_3", [name_element(ip_address("192.0.2.1"), 443, WIRE.mark(1), 60_000)])
    )
    table.add_wires(POOL.block(1))
    assert len(table.wires()) == 2 * BLOCK
    assert len(table.elements("names4_3")) == 1


def test_every_forbidden_block_is_in_the_rules(table: Table) -> None:
    listed = [*table.elements("forbidden4"), *table.elements("forbidden6")]
    assert len([each for each in listed if len(each.key) == 4]) >= len([net for net in FORBIDDEN if net.version == 4])
    text = nft("list", "set", "inet", table.name, "forbidden4")
    assert "169.254.0.0/16" in text
    assert "127.0.0.0/8" in text
    assert "fe80::/10" in nft("list", "set", "inet", table.name, "forbidden6")


def test_no_rule_of_ours_lets_anything_pass_that_is_not_a_wires(table: Table) -> None:
    """In every chain that the kernel calls by itself, each rule is about our interfaces, or our addresses, first."""
    listed = json.loads(nft("-j", "list", "table", "inet", table.name))["nftables"]
    hooks = {each["chain"]["name"] for each in listed if "hook" in each.get("chain", {})}
    assert hooks == {"spoofing", "questions", "answers", "input", "output", "forward", "postrouting", "passing"}
    for rule in (each["rule"] for each in listed if each.get("rule", {}).get("chain") in hooks):
        words = json.dumps(rule["expr"])
        assert any(name in words for name in ("@wires", "@answering", "@inner", "@outer", "@live")), words


# Elements -----------------------------------------------------------------------------------------------------------

ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))
PORTS = st.integers(1, 65535)
MARKS = st.integers(1, (1 << 32) - 1)


def add_by_nft(table: Table, name: str, elements: Sequence[Any]) -> None:
    run_nft([{"add": {"element": {"family": "inet", "table": table.name, "name": name, "elem": list(elements)}}}])


same_machine = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@same_machine
@given(ADDRESSES, PORTS, MARKS, st.integers(1, 86_400))
def test_addresses_are_encoded_as_nft_does(table: Table, address: Address, port: int, mark: int, seconds: int) -> None:
    name = f"names{address.version}_3"
    table.commit([flush_set(table.name, name)])
    table.commit(add_elements(table.name, name, [name_element(address, port, mark, seconds * 1000)]))
    ours, found = contents(table, name, "map"), table.elements(name)
    table.commit([flush_set(table.name, name)])
    key = {"elem": {"val": {"concat": [str(address), port]}, "timeout": seconds}}
    add_by_nft(table, name, [[key, mark]])
    assert contents(table, name, "map") == ours
    assert [(read_target(each.key), read_mark(each.data)) for each in found] == [((address, port), mark)]
    assert found[0].timeout == seconds * 1000
    assert 0 < found[0].remaining <= seconds * 1000


@same_machine
@given(ADDRESSES, st.integers(0, 1 << 20), PORTS, MARKS)
def test_ranges_are_encoded_as_nft_does(table: Table, first: Address, size: int, port: int, mark: int) -> None:
    last = ip_address(min(int(first) + size, (1 << first.max_prefixlen) - 1).to_bytes(first.max_prefixlen // 8, "big"))
    name = f"blocks{first.version}_3"
    table.commit([flush_set(table.name, name)])
    table.commit(add_elements(table.name, name, [range_element(first, last, port, mark)]))
    ours, found = contents(table, name, "map"), table.elements(name)
    table.commit([flush_set(table.name, name)])
    value = str(first) if first == last else {"range": [str(first), str(last)]}
    add_by_nft(table, name, [[{"concat": [value, port]}, mark]])
    assert contents(table, name, "map") == ours
    assert (read_target(found[0].key), read_target(found[0].end)) == ((first, port), (last, port))


@same_machine
@given(MARKS)
def test_marks_are_encoded_as_nft_does(table: Table, mark: int) -> None:
    table.commit([flush_set(table.name, "live")])
    table.commit(add_elements(table.name, "live", [live_element(mark)]))
    ours = contents(table, "live", "set")
    table.commit([flush_set(table.name, "live")])
    add_by_nft(table, "live", [mark])
    assert contents(table, "live", "set") == ours


def test_a_wires_name_is_encoded_as_nft_does(table: Table) -> None:
    table.commit(add_elements(table.name, f"every_{WIRE.index}", [every_element(WIRE.interface, WIRE.mark(3))]))
    ours = contents(table, f"every_{WIRE.index}", "map")
    table.commit([flush_set(table.name, f"every_{WIRE.index}")])
    add_by_nft(table, f"every_{WIRE.index}", [[WIRE.interface, WIRE.mark(3)]])
    assert contents(table, f"every_{WIRE.index}", "map") == ours


def test_many_elements_go_in_one_transaction(table: Table) -> None:
    elements = [
        name_element(ip_address(f"198.18.{each >> 8}.{each & 255}"), 443, WIRE.mark(1), 60_000) for each in range(4000)
    ]
    table.commit(add_elements(table.name, "names4_3", elements))
    assert {each.key for each in table.elements("names4_3")} == {each.key for each in elements}
    table.commit(delete_elements(table.name, "names4_3", [Element(each.key) for each in elements]))
    assert table.elements("names4_3") == []


def test_a_transaction_that_fails_changes_nothing(table: Table) -> None:
    mark = live_element(WIRE.mark(1))
    absent = name_element(ip_address("192.0.2.9"), 443, WIRE.mark(1), 0)
    with pytest.raises(NoSuchThing):
        table.commit([*add_elements(table.name, "live", [mark]), *delete_elements(table.name, "names4_3", [absent])])
    assert table.elements("live") == []
    with pytest.raises(NetlinkError):
        table.commit([*delete_elements(table.name, "names4_3", [absent]), *add_elements(table.name, "live", [mark])])
    assert table.elements("live") == []
    table.commit(add_elements(table.name, "live", [mark]))
    assert len(table.elements("live")) == 1, "and the next one is answered right"


def test_a_set_that_is_full_says_so(table: Table) -> None:
    elements = [
        name_element(ip_address(f"198.18.{each >> 8}.{each & 255}"), 443, WIRE.mark(1), 60_000) for each in range(5000)
    ]
    with pytest.raises(NetlinkError):
        table.commit(add_elements(table.name, "names4_3", elements))
    assert table.elements("names4_3") == []


def test_what_is_not_there_says_so(table: Table) -> None:
    with pytest.raises(NoSuchThing):
        table.elements("names4_9999")
    with pytest.raises(NoSuchThing):
        table.commit(add_elements("k8e_other", "live", [live_element(1)]))


def test_emptying_a_wire_touches_no_other(table: Table) -> None:
    other = POOL.wire(4)
    for wire in (WIRE, other):
        fill(table, wire)
    before = snapshot(table, other)
    table.commit(table.clear(WIRE))
    assert all(table.elements(name) == [] for name in wire_sets(WIRE))
    assert snapshot(table, other) == before


def fill(table: Table, wire: Wire) -> None:
    four, six = ip_address("192.0.2.1"), ip_address("2001:db8::1")
    table.commit(add_elements(table.name, f"every_{wire.index}", [every_element(wire.interface, wire.mark(2))]))
    for version, address in ((4, four), (6, six)):
        table.commit(
            [
                *add_elements(
                    table.name, f"names{version}_{wire.index}", [name_element(address, 80, wire.mark(1), 60_000)]
                ),
                *add_elements(
                    table.name, f"blocks{version}_{wire.index}", [range_element(address, address, 80, wire.mark(1))]
                ),
            ]
        )


def snapshot(table: Table, wire: Wire) -> dict[str, set[tuple[bytes, bytes, bytes]]]:
    return {name: {(each.key, each.end, each.data) for each in table.elements(name)} for name in wire_sets(wire)}


def test_a_complaint_of_nft_is_told(machine: None) -> None:
    with pytest.raises(EngineError) as raised:
        run_nft(build_wires("k8e_nowhere", POOL.block(0)))
    assert raised.value.control == "network rules"
    assert "No such file or directory" in raised.value.cause
    run_nft(build_table("k8e_somewhere", FORBIDDEN, GLOBAL))


def test_without_nft_it_says_what_to_install(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from k8e.engine.local.network import table as module

    monkeypatch.setattr(module, "find_tool", lambda name: None)
    with pytest.raises(EngineError) as raised:
        run_nft([])
    assert "apt-get install nftables" in raised.value.hint
