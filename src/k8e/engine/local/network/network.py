"""The network of an engine's sandboxes: puts wires, rules, names and refusals together.

Opening one leaves traces in a fixed order: the lease of its wire, its record, its elements in the table, the
interfaces. All of them are found by the lease, which is the first to come and the last to go. The resolver's sockets,
which end with the daemon, come last: they are bound to the interface.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k8e.damage import Damaged, Damages
from k8e.engine import EngineError, Refusal
from k8e.engine.local.dns.rate_limits import Throttle
from k8e.engine.local.dns.resolv_conf import Server
from k8e.engine.local.dns.server import NameServer
from k8e.engine.local.dns.upstream import Upstream
from k8e.engine.local.network.addresses import Pool, Wire
from k8e.engine.local.network.admissions import Admissions, Change, change_messages
from k8e.engine.local.network.machine import Machine
from k8e.engine.local.network.netlink.connections import cut_connections, forget_connections
from k8e.engine.local.network.netlink.elements import Element, delete_elements, live_element
from k8e.engine.local.network.netlink.messages import Message, NetlinkError, NoSuchThing
from k8e.engine.local.network.record import EgressRecord, restore
from k8e.engine.local.network.refusals import RefusalContext, Refusals, read_refusals
from k8e.engine.local.network.table import is_own_address
from k8e.engine.local.network.traffic import Traffic
from k8e.engine.local.network.watch import Watch
from k8e.engine.local.network.wires import alias_of, open_wire, wire_exists
from k8e.engine.tasks import finish_in_thread
from k8e.policy import Address, HostEntry, HostList

_BASH = "/bin/bash"
_PAUSE, _LONG_PAUSE = 0.1, 5.0  # seconds
# Answers that are admitted for one sandbox: per second, and at once after a quiet moment.
ADMISSIONS, ADMISSIONS_AT_ONCE = 50.0, 200.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attachment:
    """The network of one sandbox."""

    wire: Wire
    record: Path
    admissions: Admissions
    traffic: Traffic
    namespace: int = -1  # a descriptor (of a virtual machine: the tap), until the sandbox has it
    refusals: Refusals = field(default_factory=Refusals)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    throttle: Throttle = field(default_factory=lambda: Throttle(ADMISSIONS, ADMISSIONS_AT_ONCE))


class Network:
    """One per engine. `record_of` says where a sandbox's record is, `mirrors` which names are the machine's own
    registries."""

    def __init__(
        self,
        tag: str,
        record_of: Callable[[str], Path],
        *,
        pool: Pool,
        nameservers: Sequence[Address | Server] = (),
        mirrors: Callable[[], frozenset[str]] = frozenset,
        damages: Damages,
        machine: Machine | None = None,
    ) -> None:
        self._machine = machine or Machine(tag, pool)
        self._own_wires = machine is None
        self._record_of = record_of
        self._damages = damages
        self._attachments: dict[str, Attachment] = {}
        self._preparing = asyncio.Lock()
        self._nameservers = nameservers
        self._mirrors = mirrors
        self._names: NameServer | None = None
        self._watch: Watch | None = None
        self._mending: asyncio.Task[None] | None = None
        self.flushed = False  # our rules were not there when they were looked at

    # Opening ---------------------------------------------------------------------------------------------------------

    async def open(
        self, sandbox: str, hosts: HostList, hostname: str, *, lay: Callable[[Wire, str], int] = open_wire
    ) -> tuple[Wire, str]:
        """Makes a wire that lets out what the list allows. Returns it with the path of the namespace at its other end,
        which is there until `let_go`. On failure `remove` has to be called, as after a crash. `lay`: makes another kind
        of wire (open_tap), of which `descriptor` is the other end."""
        async with self._preparing:
            wire = None
            if self._watch is not None:
                wire = await finish_in_thread(self._machine.take_wire_at_once, sandbox)
            if wire is None:
                await self._prepare()
                wire = await finish_in_thread(self._machine.take_wire, sandbox)
            for former in [name for name, each in self._attachments.items() if each.wire == wire]:
                await self.detach(former)  # another engine removed it
        admissions, change = Admissions(wire).adopt(hosts, time.monotonic())
        attachment = self._attachments[sandbox] = self._attach(sandbox, wire, admissions)
        await finish_in_thread(self._open, attachment, sandbox, change, lay)
        await self._serve(sandbox, attachment, hostname)
        return wire, f"/proc/{os.getpid()}/fd/{attachment.namespace}"

    def _open(
        self, attachment: Attachment, sandbox: str, change: Change, lay: Callable[[Wire, str], int] = open_wire
    ) -> None:
        """Blocks. What the list allows is in force before there is a wire."""
        self._write(attachment, change, attachment.admissions)
        attachment.namespace = lay(attachment.wire, sandbox)  # in the thread: also when the caller is cancelled

    def descriptor(self, sandbox: str) -> int:
        """The other end of its wire, until `let_go`."""
        return self._attachment(sandbox).namespace

    def let_go(self, sandbox: str) -> None:
        """Closes the namespace's descriptor: from now on it lives as long as the processes in it."""
        if attachment := self._attachments.get(sandbox):
            _let_go(attachment)

    async def reserve(self, name: str) -> Wire:
        """Only the addresses of a wire."""
        async with self._preparing:
            await self._prepare()
            return await finish_in_thread(self._machine.take_wire, name)

    async def _prepare(self, *, doubtful: bool = False) -> None:
        if self._watch is None:
            doubtful = True  # rules may have gone unwatched
            self._watch = Watch(self._machine.table.name, self._has_wire, self._mend)
        if await finish_in_thread(self._machine.prepare, doubtful=doubtful):
            # Our rules were gone. New ones let nothing out, so the kernel has to be told again what is open.
            for sandbox, attachment in list(self._attachments.items()):
                if await finish_in_thread(self._machine.wire_of, sandbox) != attachment.wire:
                    continue  # another engine removed it
                fresh, change = Admissions(attachment.wire).adopt(attachment.admissions.hosts, time.monotonic())
                attachment.admissions = fresh
                await finish_in_thread(forget_connections, self._machine.table.kernel, attachment.wire)
                await finish_in_thread(self._write, attachment, change, fresh)

    def _write(self, attachment: Attachment, change: Change, known: Admissions | None) -> None:
        """Blocks. The record first, if there is something new to record: after a crash in between, the new list is
        applied again, and a mark that the record does not know is closed by the next daemon. If the kernel refuses, the
        old list is in force and on record."""
        try:
            if known is not None:
                EgressRecord.of(known, more=change.reasons).save(attachment.record)
            try:
                self._commit(change_messages(self._machine.table.name, attachment.wire, change, time.monotonic()))
            except EngineError:
                EgressRecord.of(attachment.admissions).save(attachment.record)
                raise
        except OSError as error:
            raise EngineError("network list", f"cannot be recorded: {error}") from error

    def _commit(self, messages: Sequence[Message]) -> None:
        try:
            self._machine.table.commit(messages)
        except NetlinkError as error:
            raise EngineError("network rules", f"the kernel refused a change: {error}") from error

    async def _serve(self, sandbox: str, attachment: Attachment, hostname: str) -> None:
        if self._names is None:
            upstream = Upstream([each if isinstance(each, Server) else Server(each) for each in self._nameservers])
            self._names = NameServer(upstream, self._admit, self._refuse_name, self._mirrors)
        wire, hosts = attachment.wire, attachment.admissions.hosts
        addresses = wire.host_addresses
        try:
            await self._names.serve(sandbox, addresses, hosts, hostname=hostname, device=wire.interface)
        except OSError as error:
            where = ", ".join(map(str, addresses))
            raise EngineError(
                "network names",
                f"port 53 of {where} cannot be had: {error}",
                "a name server of this machine that listens on every address has to be bound to its own (ss -lnp)",
            ) from error

    def knows(self, sandbox: str) -> bool:
        return sandbox in self._attachments

    async def resume(self, sandbox: str, hostname: str) -> None:
        """Goes on with a sandbox that another daemon opened: its rules have been in force all the time."""
        if sandbox in self._attachments:
            return
        async with self._preparing:
            await self._prepare()
            if sandbox in self._attachments:
                return
            attachment = await finish_in_thread(self._recall, sandbox)
            if wire_exists(attachment.wire):  # else it ended meanwhile, and nothing asks any more
                await self._serve(sandbox, attachment, hostname)
            self._attachments[sandbox] = attachment

    def _recall(self, sandbox: str) -> Attachment:
        machine = self._machine
        wire, path = machine.wire_of(sandbox), self._record_of(sandbox)
        if wire is None:
            raise EngineError("network", f"{sandbox} has none")
        found = [each for version in (4, 6) for each in machine.table.elements(f"names{version}_{wire.index}")]
        now = time.monotonic()
        restored = restore(wire, self._load_record(path), found, machine.live_marks(wire), now)
        admissions, change = restored.admissions.adopt(restored.admissions.hosts, now)
        EgressRecord.of(admissions).save(path)
        messages = delete_elements(machine.table.name, "live", map(live_element, restored.dead))
        for each in restored.unknown:
            name = f"names{4 if len(each.key) == 8 else 6}_{wire.index}"
            messages += delete_elements(machine.table.name, name, [Element(each.key)])
        self._commit(messages + change_messages(machine.table.name, wire, change, now))
        return self._attach(sandbox, wire, admissions)

    def _attach(self, sandbox: str, wire: Wire, admissions: Admissions) -> Attachment:
        interface = wire.interface if self._own_wires else ""  # a pod's has another name
        return Attachment(wire, self._record_of(sandbox), admissions, Traffic(interface, alias_of(sandbox)))

    def _load_record(self, path: Path) -> EgressRecord:
        """Without one that can be read nothing is let out, until core gives the sandbox its list again."""
        try:
            return EgressRecord.load(path)
        except FileNotFoundError:
            self._damages.tell(path, "it is not there")
        except Damaged as error:
            self._damages.set_aside(path, error)
        return EgressRecord((), ())

    # Using -----------------------------------------------------------------------------------------------------------

    async def set_hosts(self, sandbox: str, hosts: HostList) -> None:
        attachment = self._attachment(sandbox)
        async with attachment.lock:
            before = attachment.admissions
            after, change = before.adopt(hosts, time.monotonic())
            same = (before.hosts, before.marks) == (after.hosts, after.marks)
            await finish_in_thread(self._write, attachment, change, None if same else after)
            attachment.admissions = after
            if self._names is not None:
                self._names.set_hosts(sandbox, hosts)
            if change.dead:
                kernel, dead = self._machine.table.kernel, frozenset(change.dead)
                await finish_in_thread(cut_connections, kernel, attachment.wire, dead)

    async def _admit(
        self, sandbox: str, entry: HostEntry, name: str, addresses: Sequence[Address], seconds: float
    ) -> None:
        """Throttled: a sandbox can cause this with name servers of its own, and it costs time of the loop."""
        attachment = self._attachment(sandbox)
        attachment.refusals.learn(name, addresses)
        if not attachment.admissions.admit(entry, addresses, seconds, time.monotonic()):
            return
        await attachment.throttle.take()
        async with attachment.lock:
            change = attachment.admissions.admit(entry, addresses, seconds, time.monotonic())
            if change:
                known = attachment.admissions
                await finish_in_thread(self._write, attachment, change, known if change.reasons else None)
                known.take(change)

    def _refuse_name(self, sandbox: str, name: str, reason: str, address: str) -> None:
        if attachment := self._attachments.get(sandbox):
            attachment.refusals.refuse_name(name, reason, address, time.time())

    def reach_resolver(self, sandbox: str) -> tuple[str, ...]:
        """A command that succeeds inside when the wire works."""
        wire = self._attachment(sandbox).wire
        if not os.path.exists(_BASH):
            return ("/bin/true",)
        tries = " && ".join(f"exec 3<>/dev/tcp/{address}/53" for address in wire.host_addresses)
        return (_BASH, "-c", tries)

    def refusals(self, sandbox: str) -> list[Refusal]:
        """Since the last call. Two short requests to the kernel, which answers at once: not worth a thread. None of it
        where no packet was sent and no rule of the machine has changed since then."""
        attachment = self._attachment(sandbox)
        told = attachment.refusals.take_names() if attachment.refusals.names else []
        if not self._may_have_refused(attachment):
            return told
        try:
            told += self._take_refused(attachment)
        except BaseException:
            attachment.traffic.forget()
            raise
        return told

    def _may_have_refused(self, attachment: Attachment) -> bool:
        return attachment.traffic.arrived() or self._watch is None or self._watch.has_news()

    def _take_refused(self, attachment: Attachment) -> list[Refusal]:
        told: list[Refusal] = []
        table = self._machine.table
        for version in (4, 6):
            name = f"refused{version}_{attachment.wire.index}"
            try:
                found = table.elements(name)
            except NoSuchThing:
                self.flushed = True
                attachment.traffic.forget()
                break
            if not found:
                continue
            try:
                table.commit(delete_elements(table.name, name, (Element(each.key) for each in found)))
            except NoSuchThing:
                attachment.traffic.forget()
                continue  # one of them has just expired in the kernel: told the next time
            except NetlinkError as error:
                raise EngineError("network refusals", str(error)) from error
            told += read_refusals(found, self._context(attachment), time.time())
        return told

    def _context(self, attachment: Attachment) -> RefusalContext:
        return RefusalContext(
            attachment.admissions.hosts,
            lambda address: attachment.refusals.known.get(address, ""),
            is_own_address,
            self._machine.sandbox_networks(),
            lambda address, port: attachment.admissions.is_open((address, port), time.monotonic()),
        )

    async def repair(self) -> None:
        """Makes rules again that were flushed."""
        self.flushed = False
        async with self._preparing:
            await self._prepare(doubtful=True)

    def _has_wire(self, interface: str) -> bool:
        return any(each.wire.interface == interface for each in self._attachments.values())

    def _mend(self) -> None:
        """Rules went, perhaps ours, perhaps by our own hand. Nothing passes meanwhile (routing_rules.py). An engine
        without sandboxes looks when the first one comes."""
        if self._attachments and (self._mending is None or self._mending.done()):
            self._mending = asyncio.ensure_future(self._keep_repairing())

    async def _keep_repairing(self) -> None:
        """Until it works: the reload of a firewall may not be done yet."""
        pause = _PAUSE
        while self._watch is not None:
            self._watch.noticed = False
            try:
                await self.repair()
            except EngineError as error:
                _log.warning("the network's rules cannot be made again: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONG_PAUSE)
                continue
            if not self._watch.noticed:
                return

    def _attachment(self, sandbox: str) -> Attachment:
        try:
            return self._attachments[sandbox]
        except KeyError:
            raise EngineError("network", f"{sandbox} has none") from None

    # Ending ----------------------------------------------------------------------------------------------------------

    def sandboxes(self) -> set[str]:
        """Every one of which there is a trace."""
        return self._machine.sandboxes()

    async def remove(self, sandbox: str) -> None:
        """Everything that is there. No process of the sandbox runs any more."""
        await self.remove_wires(sandbox, await self.detach(sandbox))

    async def detach(self, sandbox: str) -> tuple[int, ...] | None:
        """Answers it no more, and writes nothing down for it. Returns all marks that it has, if they are known."""
        if self._names is not None:
            await self._names.leave(sandbox)
        attachment = self._attachments.pop(sandbox, None)
        if attachment is None:
            return None
        _let_go(attachment)
        attachment.traffic.close()
        return tuple(attachment.admissions.marks.values())

    async def remove_wires(self, sandbox: str, marks: tuple[int, ...] | None) -> None:
        """Removes all that is there of them, after `detach`."""
        await finish_in_thread(self._machine.remove_wires, sandbox, marks)

    async def close(self) -> None:
        """Rules stay in force for sandboxes that live on."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])
        if self._names is not None:
            await self._names.close()
            self._names = None
        for attachment in self._attachments.values():
            attachment.traffic.close()
        self._attachments.clear()
        await finish_in_thread(self._machine.leave)


def _let_go(attachment: Attachment) -> None:
    descriptor, attachment.namespace = attachment.namespace, -1
    if descriptor >= 0:
        os.close(descriptor)
