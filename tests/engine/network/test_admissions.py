"""The hosts that a sandbox may reach at a moment, compared with a slow and obvious answer, after any history of lists
and names."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Pool
from k8e.engine.local.network.admissions import (
    GRACE,
    MAX_ENTRIES,
    MAX_REASONS,
    Admissions,
    Change,
    Target,
    split_ranges,
)
from k8e.engine.local.network.rules import MAX_ADDRESSES
from k8e.policy import EVERYTHING, Address, HostEntry, HostList

WIRE = Pool().wire(5)
ENTRIES = [
    HostList.parse([text]).entries[0]
    for text in (
        *("a.com", "b.com", "a.com:8080", "*.c.com", "192.0.2.0/24", "192.0.2.0/25:443", "192.0.2.7", "192.0.2.8:80"),
        *("2001:db8::/32", "[2001:db8::1]:443", "0.0.0.0/0:22", "*", "45.90.0.0/16"),
    )
]
NAMED = [entry for entry in ENTRIES if entry.network is None]
PRIVATE = [ip_address(text) for text in ("198.51.100.1", "198.51.100.2", "192.0.2.7", "2001:db8::1")]
PUBLIC = [ip_address(text) for text in ("2001:db9::9", "45.90.31.1")]
ADDRESSES = [*PRIVATE, *PUBLIC]
PORTS = (22, 80, 443, 8080)
LISTS = st.lists(st.sampled_from(ENTRIES), max_size=6).map(
    lambda entries: HostList(tuple(sorted(set(entries), key=str)))
)


@dataclass(slots=True)
class Kernel:
    """The content of a wire's sets, changed only by changes."""

    live: set[int] = field(default_factory=set)
    names: dict[Target, tuple[int, float]] = field(default_factory=dict)
    ranges: list[tuple[Address, Address, int, int]] = field(default_factory=list)
    every: int = 0

    def apply(self, change: Change) -> None:
        assert set(change.dead) <= self.live
        assert not set(change.live) & self.live
        self.live = self.live - set(change.dead) | set(change.live)
        for target, opening in change.closed:
            # May have gone by itself; if it is there, it is as we think it is.
            held = self.names.pop(target, None)
            assert held is None or held[0] == opening.mark
        for target, opening in change.opened:
            assert target not in self.names, "adding what is there with another mark fails"
            self.names[target] = opening.mark, opening.end
        if change.ranges is not None:
            self.ranges = [(each.first, each.last, each.port, mark) for each, mark in change.ranges]
            self.every = change.every

    def open(self, address: Address, port: int, now: float) -> int | None:
        """The mark of a new connection."""
        held = self.names.get((address, port))
        if held is not None and held[1] > now:
            return held[0]
        found = [
            mark
            for first, last, range_port, mark in self.ranges
            if port == range_port and first.version == address.version and int(first) <= int(address) <= int(last)
        ]
        assert len(found) <= 1, "the kernel takes no ranges that overlap"
        if not found and self.every and address in PUBLIC:
            return self.every
        return found[0] if found else None


def is_within_everything(entry: HostEntry) -> bool:
    return entry.network is None or entry == ENTRIES[-1]


class History(RuleBasedStateMachine):
    @initialize(hosts=LISTS)
    def begin(self, hosts: HostList) -> None:
        self.now = 1000.0
        self.kernel = Kernel()
        self.state = Admissions(WIRE)
        self.told: dict[Target, dict[HostEntry, float]] = {}
        self.connections: dict[int, tuple[int, frozenset[HostEntry]]] = {}  # mark, and what allowed it
        self.set_list(hosts)

    def take(self, result: tuple[Admissions, Change]) -> None:
        self.state, change = result
        self.kernel.apply(change)

    @rule(hosts=LISTS)
    def set_list(self, hosts: HostList) -> None:
        self.hosts = hosts
        self.take(self.state.adopt(hosts, self.now))
        listed = set(hosts.entries)

        def holds(reasons: frozenset[HostEntry]) -> bool:
            return bool(reasons & listed) or (EVERYTHING in listed and any(map(is_within_everything, reasons)))

        for target, ends in self.told.items():
            self.told[target] = {entry: end for entry, end in ends.items() if entry in listed}
        # A connection lives while something of what allowed it is listed, or everything, and not a moment longer.
        for mark, reasons in self.connections.values():
            assert (mark in self.kernel.live) == holds(reasons)
        self.connections = {key: each for key, each in self.connections.items() if holds(each[1])}

    @rule(
        entry=st.sampled_from(NAMED),
        addresses=st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=3),
        seconds=st.integers(1, 300),
    )
    def resolve(self, entry: HostEntry, addresses: list[Address], seconds: int) -> None:
        change = self.state.admit(entry, addresses, float(seconds), self.now)
        self.state.take(change)
        self.kernel.apply(change)
        if entry in self.hosts.entries:
            for target in ((address, port) for address in addresses for port in entry.ports):
                if entry == EVERYTHING and target[0] in PUBLIC:
                    continue  # which needs no name
                ends = self.told.setdefault(target, {})
                ends[entry] = max(ends.get(entry, 0.0), self.now + seconds)

    @rule(seconds=st.integers(1, 400))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.kernel.names = {target: held for target, held in self.kernel.names.items() if held[1] > self.now}

    @precondition(lambda self: self.told or self.hosts.entries)
    @rule(address=st.sampled_from(ADDRESSES), port=st.sampled_from(PORTS))
    def connect(self, address: Address, port: int) -> None:
        mark = self.kernel.open(address, port, self.now)
        if mark is not None:
            assert mark in self.kernel.live, "whatever lets a connection out is in force"
            reasons = next(reason for reason, known in self.state.marks.items() if known == mark)
            self.connections[len(self.connections)] = mark, reasons & frozenset(self.hosts.entries)

    @invariant()
    def nothing_else_is_open(self) -> None:
        for address in ADDRESSES:
            for port in PORTS:
                ends = self.told.get((address, port), {})
                found = self.hosts.entries_for_address(address)
                listed = [entry for entry in found if port in entry.ports or entry == EVERYTHING]
                promised = bool(listed) or any(end > self.now for end in ends.values())
                possible = bool(listed) or any(end + GRACE > self.now for end in ends.values())
                is_open = self.kernel.open(address, port, self.now) is not None
                assert is_open or not promised, (address, port)
                assert possible or not is_open, (address, port)

    @invariant()
    def the_state_is_what_the_kernel_has(self) -> None:
        assert set(self.state.marks.values()) == self.kernel.live
        known = {target: (each.mark, each.end) for target, each in self.state.openings.items() if each.end > self.now}
        assert known == {target: held for target, held in self.kernel.names.items() if held[1] > self.now}


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def reasons_for(entries: Iterable[HostEntry], address: Address, port: int) -> list[frozenset[HostEntry]]:
    return [
        each.reason
        for each in split_ranges(entries)
        if each.port == port and each.first.version == address.version
        if int(each.first) <= int(address) <= int(each.last)
    ]


@given(LISTS, st.sampled_from(ADDRESSES), st.sampled_from(PORTS))
def test_ranges_are_disjoint_and_know_every_reason(hosts: HostList, address: Address, port: int) -> None:
    entries = [entry for entry in hosts.entries if entry.network is not None]
    expected = frozenset(entry for entry in entries if port in entry.ports and address in (entry.network or ()))
    assert reasons_for(entries, address, port) == ([expected] if expected else [])
    assert len(split_ranges(entries)) <= 2 * sum(len(entry.ports) for entry in entries)


def test_a_name_with_no_end_of_addresses_takes_the_place_of_its_oldest() -> None:
    hosts = HostList.parse(["a.com:443"])
    state, kernel = Admissions(WIRE), Kernel()
    state, change = state.adopt(hosts, 0.0)
    kernel.apply(change)
    for turn in range(MAX_ADDRESSES // 100 + 5):
        addresses = [ip_address(f"198.18.{turn}.{number}") for number in range(100)]
        change = state.admit(hosts.entries[0], addresses, 1000.0 + turn, float(turn))
        state.take(change)
        kernel.apply(change)
        assert len(kernel.names) <= MAX_ADDRESSES
    assert (ip_address(f"198.18.{turn}.99"), 443) in kernel.names
    assert (ip_address("198.18.0.0"), 443) not in kernel.names


def test_a_list_that_falls_into_too_many_parts_is_refused_and_changes_nothing() -> None:
    hosts = HostList(
        tuple(HostEntry(network=each.network, port=port) for port in range(1, 900) for each in ENTRIES[4:8])
    )
    state = Admissions(WIRE)
    with pytest.raises(EngineError) as raised:
        state.adopt(hosts, 0.0)
    assert raised.value.control == "network list"


def test_an_address_that_is_good_for_long_enough_is_not_told_again() -> None:
    hosts = HostList.parse(["a.com"])
    state, _ = Admissions(WIRE).adopt(hosts, 0.0)
    change = state.admit(hosts.entries[0], ADDRESSES[:1], 30.0, 0.0)
    assert change
    state.take(change)
    assert not state.admit(hosts.entries[0], ADDRESSES[:1], 30.0, 20.0)
    assert state.admit(hosts.entries[0], ADDRESSES[:1], 30.0, 45.0)


def test_names_of_a_list_that_was_left_admit_nothing() -> None:
    state, _ = Admissions(WIRE).adopt(HostList.parse(["b.com"]), 0.0)
    assert not state.admit(HostList.parse(["a.com"]).entries[0], ADDRESSES, 30.0, 0.0)


def test_what_is_not_taken_leaves_no_trace() -> None:
    """The kernel may refuse it."""
    hosts = HostList.parse(["a.com", "b.com"])
    state, _ = Admissions(WIRE).adopt(hosts, 0.0)
    first = state.admit(hosts.entries[0], ADDRESSES[:2], 30.0, 0.0)
    assert (state.marks, state.openings) == ({}, {})
    assert state.admit(hosts.entries[0], ADDRESSES[:2], 30.0, 0.0) == first
    state.take(first)
    before = (dict(state.marks), dict(state.openings))
    assert state.admit(hosts.entries[1], ADDRESSES[:3], 30.0, 0.0)
    assert (state.marks, state.openings) == before


def test_an_address_of_many_entries_has_a_few_reasons_and_a_list_not_too_many() -> None:
    """Of which a name server can make as many as it likes: every address gets another set of names."""
    hosts = HostList.parse([f"*.n{number}.com:443" for number in range(500)])
    state, _ = Admissions(WIRE).adopt(hosts, 0.0)
    for entry in hosts.entries[:100]:
        state.take(state.admit(entry, ADDRESSES[:1], 30.0, 0.0))
    assert max(map(len, state.marks)) == MAX_ENTRIES
    chance = random.Random(1)
    with pytest.raises(EngineError) as raised:
        for turn in range(10 * MAX_REASONS):
            entry = chance.choice(hosts.entries)
            state.take(state.admit(entry, [ip_address(f"198.18.0.{turn % 97}")], 30.0 + turn, 0.0))
    assert raised.value.control == "network list"
    assert len(state.marks) == MAX_REASONS


def test_what_an_answer_costs_does_not_grow_with_what_is_open() -> None:
    """Counted, not timed: what is looked at of what is there already."""
    hosts = HostList.parse(["*.a.com"])
    costs = []
    for filled in (0, MAX_ADDRESSES):
        state, _ = Admissions(WIRE).adopt(hosts, 0.0)
        for turn in range(filled // 32):
            addresses = [ip_address(f"45.{turn >> 8}.{turn & 255}.{number}") for number in range(16)]
            state.take(state.admit(hosts.entries[0], addresses, 600.0, 0.0))
        assert len(state.openings) == filled
        looked = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal looked
            looked += event in ("call", "c_call")

        new = [ip_address(f"46.0.0.{number}") for number in range(16)]
        sys.setprofile(count)
        change = state.admit(hosts.entries[0], new, 600.0, 1.0)
        state.take(change)
        sys.setprofile(None)
        costs.append(looked)
    assert costs[1] - costs[0] < MAX_ADDRESSES // 2, "not once for each that is there"
