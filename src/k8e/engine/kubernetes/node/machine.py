"""The node's part of the network: the table, and which of its rules are bound to which pod's interface. Blocks; called
in threads.

Numbers of wires are leased as on one machine. A lease and the file about the pod's interface are there before anything
in the kernel is, and go after it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.kubernetes.node.pod_link import PodLink, PodWire, adopt_link, forget_link
from k8e.engine.local.network.addresses import Network, Pool, Wire
from k8e.engine.local.network.bindings import bind, unbind
from k8e.engine.local.network.connection_limits import read_connection_limits
from k8e.engine.local.network.machine import Machine
from k8e.engine.local.network.netlink.connections import forget_connections
from k8e.engine.local.network.netlink.messages import Message, NetlinkError, NoSuchThing
from k8e.engine.local.network.routing_rules import guard_wires, leave_rules, make_room, unguard_wire
from k8e.engine.local.network.rules import PASS, Json, Layout
from k8e.engine.local.network.table import Table, run_nft

# Routed packets are forwarded; answers are checked for the way that their mark has.
_SETTINGS: Final = ("ipv4/ip_forward", "ipv4/conf/all/src_valid_mark")


class NodeMachine(Machine):
    def __init__(self, tag: str, state: Path, resolver: IPv4Address, agent_port: int) -> None:
        super().__init__(tag, Pool(v6=None))
        self.table = Table(f"k8e_{tag}", read_connection_limits(), Layout(prefix="", agent_port=agent_port))
        self._state = state
        self._resolver = resolver

    def record_of(self, uid: str) -> Path:
        return self._folder(uid) / "egress.json"

    def _folder(self, uid: str) -> Path:
        return self._state / "pods" / uid

    def _link_of(self, uid: str) -> PodLink | None:
        return PodLink.load(self._folder(uid) / "link.json")

    def note_link(self, uid: str, link: PodLink) -> None:
        """Before the wire is taken. What was noted first stays: later the interface is in no bridge any more."""
        if self._link_of(uid) is None:
            link.save(self._folder(uid) / "link.json")

    def link_of(self, uid: str) -> PodLink:
        if (link := self._link_of(uid)) is None:
            raise EngineError("pod network", f"the interface of {uid} is not on record")
        return link

    def _wire(self, index: int, link: PodLink) -> PodWire:
        return PodWire(
            index, self._resolver, None, link.name, IPv4Address(link.address), mac=link.mac, pod_mac=link.pod_mac
        )

    def _bound(self) -> Iterator[PodWire]:
        for index, uid in self._leases.wires().items():
            if (link := self._link_of(uid)) is not None:
                yield self._wire(index, link)

    # As Machine ------------------------------------------------------------------------------------------------------

    def prepare(self, *, doubtful: bool = False) -> bool:
        with self._lock:
            slots = [wire for block in self._leases.blocks() for wire in self.pool.block(block)]
            renewed = not self.table.is_current() or (doubtful and not self.table.is_whole(len(slots)))
            if renewed:
                self.table.replace(slots)
                run_nft(_let_neighbours_ask(self.table.name))
            wires = list(self._bound())
            for wire in wires:
                self._commit(bind(self.table.name, wire))
            if wires:
                self._forward()
                make_room()
                guard_wires(wires)
            return renewed

    def _commit(self, messages: Sequence[Message]) -> None:
        try:
            self.table.commit(messages)
        except NetlinkError as error:  # perhaps a firewall is being reloaded
            raise EngineError("network rules", f"the kernel refused a change: {error}") from error

    def _forward(self) -> None:
        for name in _SETTINGS:
            path = Path("/proc/sys/net", name)
            if path.read_text().strip() == "0":
                path.write_text("1")

    def take_wire(self, sandbox: str) -> Wire:
        """Its rules are bound to the pod's interface, and let nothing out."""
        link = self.link_of(sandbox)
        with self._lock:
            index = self._leases.take_wire(sandbox)
            if index is None:
                self.table.add_wires(self.pool.block(self._leases.lease_block(())))
                index = self._leases.take_wire(sandbox)
            if index is None:
                raise EngineError("network pool", "the wires that were leased are taken already", "try again")
            wire = self._wire(index, link)
            self._commit([*self.table.clear(wire), *bind(self.table.name, wire)])
            self._forward()
            make_room()
            guard_wires([wire])
        return wire

    def adopt(self, wire: Wire, sandbox: str) -> int:
        """As open_wire, for a wire that is there already; there is nothing to close."""
        assert isinstance(wire, PodWire)
        adopt_link(self.link_of(sandbox), wire)
        return -1

    def wire_of(self, sandbox: str) -> Wire | None:
        wires, link = self._leases.wires_of(sandbox), self._link_of(sandbox)
        return self._wire(wires[0], link) if wires and link is not None else None

    def sandbox_networks(self) -> tuple[Network, ...]:
        return tuple(IPv4Network(wire.inner4) for wire in self._bound())

    def remove_wires(self, sandbox: str, marks: Iterable[int] | None) -> None:
        """Locked: the elements that go make the network look whether all is there, and put back what is bound."""
        with self._lock:
            self._remove_wires(sandbox, marks)

    def _remove_wires(self, sandbox: str, marks: Iterable[int] | None) -> None:
        link = self._link_of(sandbox)
        for index in self._leases.wires_of(sandbox):
            if link is not None:
                wire = self._wire(index, link)
                with contextlib.suppress(NoSuchThing):
                    known = self.live_marks(wire) if marks is None else marks
                    self.table.commit([*self.clear_messages(wire, known), *unbind(self.table.name, wire)])
                forget_connections(self.table.kernel, wire)
                unguard_wire(wire)
            self._leases.release_wire(index)
        if link is not None:
            forget_link(link)
        shutil.rmtree(self._folder(sandbox), ignore_errors=True)

    def leave(self) -> None:
        with self._lock:
            if not self._leases.wires():
                if self._has_rules():
                    run_nft([*_drop_neighbours(self.table.name)])
                    self.table.remove()
                if self._leases.blocks():
                    self._leases.release_blocks(leave_rules)
            self.table.close()


def _drop_neighbours(table: str) -> list[Json]:
    named = {"family": "arp", "name": table}
    return [{"add": {"table": named}}, {"delete": {"table": named}}]


def _let_neighbours_ask(table: str) -> list[Json]:
    """Questions for hardware addresses look up a route, too, and find none without the mark (routing_rules.py)."""
    place = {"family": "arp", "table": table}
    mark = {"meta": {"key": "mark"}}
    chain = {**place, "name": "questions", "type": "filter", "hook": "input", "prio": 0, "policy": "accept"}
    rule = {**place, "chain": "questions", "expr": [{"mangle": {"key": mark, "value": {"|": [mark, PASS]}}}]}
    return [
        *_drop_neighbours(table),
        {"add": {"table": {"family": "arp", "name": table}}},
        {"add": {"chain": chain}},
        {"add": {"rule": rule}},
    ]
