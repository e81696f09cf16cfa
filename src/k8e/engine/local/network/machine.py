"""The machine's part of the network: the engine's table, its leases, IP forwarding. Blocks; called in threads.

Prepared when the first sandbox needs it, checked whenever one is opened (the machine's rules may have been flushed),
gone with the last one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.network import ip_forward
from k8e.engine.local.network.addresses import BLOCK, Network, Pool, Wire
from k8e.engine.local.network.connection_limits import read_connection_limits
from k8e.engine.local.network.leases import Leases, own_ledger
from k8e.engine.local.network.netlink.connections import forget_connections
from k8e.engine.local.network.netlink.elements import delete_elements, live_element, read_mark
from k8e.engine.local.network.netlink.messages import Message, NetlinkError, NoSuchThing
from k8e.engine.local.network.routing_rules import guard_wires, leave_rules, make_room, unguard_wire
from k8e.engine.local.network.table import Table
from k8e.engine.local.network.wires import known_networks, remove_wire

_FORWARDING = "forwarding.json"


class Machine:
    """One per engine."""

    def __init__(self, tag: str, pool: Pool) -> None:
        ledger = own_ledger()
        self.pool = pool if _has_ipv6() else Pool(pool.v4, None)
        shares = read_connection_limits()
        self._leases = Leases(tag, self.pool, ledger, shares.wires)
        self._memory = ledger / _FORWARDING
        self.table = Table(f"k8e_{tag}", shares)  # also while it is not in the kernel
        self._with_rules: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def prepare(self, *, doubtful: bool = False) -> bool:
        """Makes the rules for all wires of this engine. True: they had to be made anew, and let nothing out. `doubtful`
        checks whether every single one is there."""
        with self._lock:
            blocks = [block for block in self._leases.blocks() if block < self.pool.blocks]
            wires = [wire for block in blocks for wire in self.pool.block(block)]
            renewed = not self.table.is_current() or (doubtful and not self.table.is_whole())
            if renewed:
                self.table.replace(wires)
            try:
                self._with_rules = self.table.wires()
            except NetlinkError as error:  # flushed again: a firewall is being reloaded
                raise EngineError("network rules", f"they went while they were looked at: {error}") from error
            self._add_rules(wires)
            if wires:
                self._forward()
            if wires and (renewed or doubtful):
                make_room()
                guard_wires(self.pool.wire(index) for index in self._leases.wires() if index < self.pool.wires)
            return renewed

    def _add_rules(self, wires: Iterable[Wire]) -> None:
        wanted = list(wires)
        missing = [wire for wire in wanted if wire.interface not in self._with_rules]
        if not missing:
            return
        try:
            self.table.add_wires(missing)
        except EngineError:
            # The nft of an engine that was killed may have added the same ones a moment ago: all at once, or none.
            with contextlib.suppress(NetlinkError):
                self._with_rules = self.table.wires()
            missing = [wire for wire in wanted if wire.interface not in self._with_rules]
            if missing:
                raise
        self._with_rules |= {wire.interface for wire in missing}

    def _forward(self) -> None:
        if ip_forward.plan_forwarding():
            with self._leases.locked():
                ip_forward.switch_on(self._memory)

    def take_wire_at_once(self, sandbox: str) -> Wire | None:
        """None: the rules are gone, and `prepare` comes first. Those of a table that is there are as `prepare` left
        them: the engine changes no others, and is told when anything else does (watch.py)."""
        with self._lock:
            if not self.table.is_current():
                return None
            self._forward()
        return self.take_wire(sandbox)

    def take_wire(self, sandbox: str) -> Wire:
        """Its rules are there, and its sets are empty."""
        with self._lock:
            index = self._leases.take_wire(sandbox)
            if index is None:
                self._leases.lease_block(known_networks())
                self._forward()
                make_room()
                index = self._leases.take_wire(sandbox)
            if index is None:
                raise EngineError("network pool", "the wires that were leased are taken already", "try again")
            self._add_rules(self.pool.block(index // BLOCK))
            guard_wires([self.pool.wire(index)])
        return self.pool.wire(index)

    def wire_of(self, sandbox: str) -> Wire | None:
        wires = self._leases.wires_of(sandbox)
        return self.pool.wire(wires[0]) if wires else None

    def live_marks(self, wire: Wire) -> set[int]:
        """The marks in force that are the wire's."""
        value, mask = wire.mark_range
        marks = (read_mark(found.key) for found in self.table.elements("live"))
        return {mark for mark in marks if mark & mask == value}

    def clear_messages(self, wire: Wire, marks: Iterable[int]) -> list[Message]:
        return [*self.table.clear(wire), *delete_elements(self.table.name, "live", map(live_element, marks))]

    def sandbox_networks(self) -> tuple[Network, ...]:
        """Where an address is a sandbox's."""
        return (self.pool.v4,) if self.pool.v6 is None else (self.pool.v4, self.pool.v6)

    def sandboxes(self) -> set[str]:
        """Every one that has a wire."""
        return set(self._leases.wires().values())

    def remove_wires(self, sandbox: str, marks: Iterable[int] | None) -> None:
        """Everything that is there of them. `marks` are all that the sandbox has, if they are known."""
        for index in self._leases.wires_of(sandbox):
            wire = self.pool.wire(index)
            remove_wire(wire)
            with contextlib.suppress(NoSuchThing):
                known = self.live_marks(wire) if marks is None else marks
                self.table.commit(self.clear_messages(wire, known))
            forget_connections(self.table.kernel, wire)
            unguard_wire(wire)
            self._leases.release_wire(index)

    def _has_rules(self) -> bool:
        """Also those of an engine that was killed before it had leased anything."""
        try:
            return self.table.is_current()
        except EngineError:
            return False  # no netfilter here, and so no rules

    def leave(self) -> None:
        """The table goes with the last sandbox; the settings of the machine are restored with the last engine."""
        with self._lock:
            if not self._leases.wires():
                if self._leases.blocks() or self._has_rules():
                    self.table.remove()
                if self._leases.blocks():
                    self._leases.release_blocks(self._give_back)
            self.table.close()

    def _give_back(self) -> None:
        leave_rules()
        ip_forward.restore(self._memory)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() == "0"
    return False
