"""The addresses that a sandbox may reach at this moment, and the change in the kernel when its list changes. Pure.

A *reason* is the set of a list's entries that allow a target; each has a mark, which the kernel puts on the connections
that it lets out. While any entry of a reason is on the list its connections go on, whatever becomes of the name's
addresses; when the last entry is removed they are cut.

`*` is a reason of its own, for all public addresses at once: the kernel has those. While it is on the list it stands in
for every entry that has nothing else, whose connections go on too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.expiry import ExpiryQueue
from k8e.engine.local.network.netlink.elements import (
    Element,
    add_elements,
    delete_elements,
    every_element,
    flush_set,
    live_element,
    name_element,
    range_element,
)
from k8e.engine.local.network.netlink.messages import Message
from k8e.engine.local.network.rules import MAX_ADDRESSES, MAX_BLOCKS
from k8e.policy import EVERYTHING, NOTHING, Address, AddressKind, HostEntry, HostList, excess, kind_of

Reason = frozenset[HostEntry]
Target = tuple[Address, int]

# Seconds beyond the TTL of a name: a client may look it up and connect in its last second, or keep an address a little
# longer than the TTL says.
GRACE = 60.0
_MOST_MARKS = 1 << 15
MAX_REASONS = 4096  # of one list
MAX_ENTRIES = 8  # of one reason, for an address of names
_EVERYTHING = HostList((EVERYTHING,))


@dataclass(frozen=True, slots=True)
class Opening:
    """A target that names on the list have as an address: by which entries, and for how long by each."""

    mark: int
    until: Mapping[HostEntry, float]

    @property
    def end(self) -> float:
        return max(self.until.values())


@dataclass(frozen=True, slots=True)
class Range:
    """Listed addresses with the same reason."""

    first: Address
    last: Address
    port: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Change:
    """From one state of a sandbox's sets to the next."""

    dead: tuple[int, ...] = ()  # marks
    live: tuple[int, ...] = ()
    closed: tuple[tuple[Target, Opening], ...] = ()
    opened: tuple[tuple[Target, Opening], ...] = ()
    ranges: tuple[tuple[Range, int], ...] | None = None  # with their marks; None: as they are
    every: int = 0  # the mark of whatever is public; only together with ranges
    reasons: tuple[tuple[Reason, int], ...] = ()  # of `live`, when something was admitted

    def __bool__(self) -> bool:
        return bool(self.dead or self.live or self.closed or self.opened or self.ranges is not None)


@dataclass(slots=True)
class Admissions:
    """A list, and which targets of it are open. `admit` only computes a change, which `take` applies: one that the
    kernel refuses leaves no trace. To admit an answer costs the same however many there were before: a sandbox causes
    it, and it is done in the daemon's loop."""

    wire: Wire
    hosts: HostList = NOTHING
    marks: dict[Reason, int] = field(default_factory=dict)
    openings: dict[Target, Opening] = field(default_factory=dict)
    _last: int = field(default=0, compare=False)  # number of the mark that was given last
    _queues: dict[int, ExpiryQueue] = field(default_factory=lambda: {4: ExpiryQueue(), 6: ExpiryQueue()}, compare=False)
    _taken: set[int] = field(default_factory=set, compare=False)  # marks

    def __post_init__(self) -> None:
        self._taken.update(self.marks.values())
        self._last = max((mark & 0xFFFF for mark in self._taken), default=self._last)
        for target, opening in self.openings.items():
            self._queues[target[0].version].add(target, opening.end)

    def admit(self, entry: HostEntry, addresses: Iterable[Address], seconds: float, now: float) -> Change:
        """The change that opens the addresses of an entry's name for so many seconds."""
        if entry not in self.hosts.entries:
            return Change()  # removed while its name was being asked for
        fresh: dict[Reason, int] = {}
        free = self._free_marks()
        until = now + seconds + GRACE
        closed: dict[Target, Opening] = {}
        opened: dict[Target, Opening] = {}
        for target in _targets(entry, addresses):
            before = self.openings.get(target)
            known = {} if before is None else {each: end for each, end in before.until.items() if end > now}
            if target in opened or known.get(entry, now) + GRACE / 2 >= until:
                continue  # good for long enough
            ends = _latest(known | {entry: max(until, known.get(entry, until))})
            if before is not None:
                closed[target] = before
            reason = frozenset(ends)
            mark = self.marks.get(reason) or fresh.get(reason)
            if mark is None:
                if len(self.marks) + len(fresh) >= MAX_REASONS:
                    cause = f"its entries lead to the same addresses in more than {MAX_REASONS} combinations"
                    raise EngineError("network list", cause, "list fewer entries that overlap")
                mark = fresh[reason] = next(free)
            opened[target] = Opening(mark, ends)
        for version, queue in self._queues.items():
            coming = [target for target in opened if target[0].version == version]
            surplus = len(queue) + sum(target not in closed for target in coming) - MAX_ADDRESSES
            if surplus > 0:
                # A name with no end of addresses takes the oldest ones' place.
                closed |= {target: self.openings[target] for target in queue.first(surplus, without=opened)}
        return Change(
            live=tuple(sorted(fresh.values())),
            closed=tuple(closed.items()),
            opened=tuple(opened.items()),
            reasons=tuple(fresh.items()),
        )

    def is_open(self, target: Target, now: float) -> bool:
        """By a name."""
        opening = self.openings.get(target)
        return opening is not None and opening.end > now

    def take(self, change: Change) -> None:
        """Notes that the kernel has made this change."""
        for reason, mark in change.reasons:
            self.marks[reason] = mark
            self._taken.add(mark)
            self._last = mark & 0xFFFF
        for target, _ in change.closed:
            if self.openings.pop(target, None) is not None:
                self._queues[target[0].version].remove(target)
        for target, opening in change.opened:
            self.openings[target] = opening
            self._queues[target[0].version].add(target, opening.end)

    def adopt(self, hosts: HostList, now: float) -> tuple[Admissions, Change]:
        """Another list is in force from now on."""
        entries = frozenset(hosts.entries)
        marks = {reason: mark for reason, mark in self.marks.items() if reason & entries or _stands_in(hosts, reason)}
        dead = tuple(sorted(set(self.marks.values()) - set(marks.values())))
        free = self._free_marks()

        def mark_for(reason: Reason) -> int:
            if reason not in marks:
                marks[reason] = next(free)
            return marks[reason]

        openings: dict[Target, Opening] = {}
        closed, opened = [], []
        for target, opening in self.openings.items():
            ends = {entry: end for entry, end in opening.until.items() if entry in entries and end > now}
            if ends and ends == opening.until:
                openings[target] = opening
                continue
            closed.append((target, opening))
            if ends:
                openings[target] = Opening(mark_for(frozenset(ends)), ends)
                opened.append((target, openings[target]))
        ranges = split_ranges(entry for entry in hosts.entries if entry.network is not None)
        if len(ranges) > MAX_BLOCKS:
            raise EngineError("network list", f"its blocks fall into {len(ranges)} parts, more than {MAX_BLOCKS}")
        marked = tuple((each, mark_for(each.reason)) for each in ranges)
        every = mark_for(frozenset({EVERYTHING})) if EVERYTHING in entries else 0
        change = Change(dead, _new(marks, self.marks), tuple(closed), tuple(opened), marked, every)
        return Admissions(self.wire, hosts, marks, openings, self._last), change

    def _free_marks(self) -> Iterator[int]:
        """Upwards, so that the mark of something revoked is not soon another entry's."""
        numbers = itertools.chain(range(self._last + 1, _MOST_MARKS), range(1, self._last + 1))
        return (mark for mark in map(self.wire.mark, numbers) if mark not in self._taken)


def _targets(entry: HostEntry, addresses: Iterable[Address]) -> Iterator[Target]:
    """The targets to open for an entry. Of `*`, those of the machine's registries: every public address is open."""
    for address in addresses:
        if not entry.everything or kind_of(address) is not AddressKind.PUBLIC:
            yield from ((address, port) for port in entry.ports)


def _stands_in(hosts: HostList, reason: Reason) -> bool:
    return EVERYTHING in hosts.entries and any(not excess(HostList((entry,)), _EVERYTHING) for entry in reason)


def _new(marks: Mapping[Reason, int], before: Mapping[Reason, int]) -> tuple[int, ...]:
    return tuple(sorted(set(marks.values()) - set(before.values())))


def _latest(ends: dict[HostEntry, float]) -> dict[HostEntry, float]:
    """Those that last longest: more than a few reasons for one address help no reader."""
    if len(ends) <= MAX_ENTRIES:
        return ends
    return dict(sorted(ends.items(), key=lambda each: each[1])[-MAX_ENTRIES:])


def split_ranges(entries: Iterable[HostEntry]) -> tuple[Range, ...]:
    """Disjoint, because the kernel takes no others; at most twice as many as there are entries and ports."""
    starts: dict[tuple[int, int], dict[int, list[HostEntry]]] = {}  # by version and port, then by first address
    ends: dict[tuple[int, int], dict[int, list[HostEntry]]] = {}
    for entry in entries:
        if entry.network is not None:
            for port in entry.ports:
                key = entry.network.version, port
                starts.setdefault(key, {}).setdefault(int(entry.network[0]), []).append(entry)
                ends.setdefault(key, {}).setdefault(int(entry.network[-1]) + 1, []).append(entry)
    found: list[Range] = []
    for version, port in sorted(starts):
        line = version, port
        here: set[HostEntry] = set()
        for first, after in itertools.pairwise(sorted(starts[line].keys() | ends[line].keys())):
            here.difference_update(ends[line].get(first, ()))
            here.update(starts[line].get(first, ()))
            if here:
                found.append(Range(_address(first, version), _address(after - 1, version), port, frozenset(here)))
    return tuple(found)


def _address(number: int, version: int) -> Address:
    return ip_address(number.to_bytes(4 if version == 4 else 16, "big"))


def change_messages(table: str, wire: Wire, change: Change, now: float) -> list[Message]:
    """As one transaction. A target to be closed may have expired a moment ago, and deleting an element that is not
    there fails the whole transaction: so it is added first, which does nothing where it is still there."""
    messages: list[Message] = []
    messages += delete_elements(table, "live", map(live_element, change.dead))
    messages += add_elements(table, "live", map(live_element, change.live))
    if change.ranges is not None:
        messages.append(flush_set(table, f"every_{wire.index}"))
        if change.every:
            messages += add_elements(table, f"every_{wire.index}", [every_element(wire.interface, change.every)])
    for version in (4, 6):
        name = f"names{version}_{wire.index}"
        closed = _name_elements(change.closed, version, now)
        messages += add_elements(table, name, closed)
        messages += delete_elements(table, name, closed)
        messages += add_elements(table, name, _name_elements(change.opened, version, now))
        if change.ranges is not None:
            name = f"blocks{version}_{wire.index}"
            messages.append(flush_set(table, name))
            messages += add_elements(
                table,
                name,
                (
                    range_element(each.first, each.last, each.port, mark)
                    for each, mark in change.ranges
                    if each.first.version == version
                ),
            )
    return messages


def _name_elements(openings: Sequence[tuple[Target, Opening]], version: int, now: float) -> list[Element]:
    return [
        name_element(address, port, opening.mark, max(1, int((opening.end - now) * 1000)))
        for (address, port), opening in openings
        if address.version == version
    ]
