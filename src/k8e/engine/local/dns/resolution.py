"""The resolution of one query, without sockets: a generator that yields each step and is sent its result.

The list is looked at again after every wait, because it may have changed meanwhile, and a name that was taken off it
must not be opened by an answer that was under way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from ipaddress import IPv6Address

import dns.edns
import dns.message
import dns.rcode
import dns.rdata
import dns.rdatatype
from dns.rdtypes.IN.SRV import SRV

from k8e.engine.local.dns.answers import MAX_TTL, MIN_TTL, Finding, build_reply
from k8e.engine.local.dns.decisions import ADDRESS_KINDS, ADDRESS_NOT_PUBLIC, Forward, LocalAnswer, Rules, decide
from k8e.engine.local.dns.queries import Query, host_name
from k8e.policy import Address, HostEntry, HostList, may_answer


@dataclass(frozen=True, slots=True)
class AskUpstream:
    """The reply is a Finding or a Failure."""

    name: str
    kind: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Let the kernel know before the sandbox does. The reply is None or a Failure."""

    entry: HostEntry
    name: str
    addresses: tuple[Address, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Tell:
    """A refusal, for the caller's result and the log."""

    name: str
    reason: str
    address: str = ""  # of the name, when it was refused for its address


@dataclass(frozen=True, slots=True)
class Failure:
    cause: str


Step = AskUpstream | Admit | Tell
Result = Finding | Failure | None


def answer_query(query: Query, rules: Callable[[], Rules]) -> Generator[Step, Result, dns.message.Message]:
    decision = decide(query, rules())
    if isinstance(decision, LocalAnswer):
        return (yield from _answer_locally(query, decision))
    finding = yield AskUpstream(query.name, query.kind)
    if not isinstance(finding, Finding):
        return _fail(query, finding)
    now = rules()
    decision = decide(query, now)
    if isinstance(decision, LocalAnswer):
        return (yield from _answer_locally(query, decision))
    if not finding.exists:
        return build_reply(query, dns.rcode.NXDOMAIN)
    ttl = min(max(finding.ttl, MIN_TTL), MAX_TTL)
    if query.kind in ADDRESS_KINDS:
        return (yield from _answer_addresses(query, rules, decision, finding, ttl))
    records = finding.records
    if query.kind == dns.rdatatype.SRV:
        records = tuple(record for record in records if _leads_to(record, now.hosts))
    return build_reply(query, records=records, ttl=ttl)


def _answer_addresses(
    query: Query, rules: Callable[[], Rules], asked: Forward, finding: Finding, ttl: int
) -> Generator[Step, Result, dns.message.Message]:
    now = rules()
    opened, records = choose_addresses(finding, now.hosts, registry=query.name in now.mirrors)
    if finding.records and not records:
        # No NXDOMAIN: musl would throw away the addresses of the other family with it.
        remark = (dns.edns.EDECode.FILTERED, "the name leads to an address that sandboxes may not reach")
        yield Tell(query.name, ADDRESS_NOT_PUBLIC, str(finding.addresses[0]))
        return build_reply(query, remark=remark)
    if opened:
        for entry in asked.entries:
            result = yield Admit(entry, query.name, opened, float(ttl))
            if isinstance(result, Failure):
                return _fail(query, result)
        decision = decide(query, rules())
        if isinstance(decision, LocalAnswer):
            return (yield from _answer_locally(query, decision))
    return build_reply(query, records=records, ttl=ttl)


def choose_addresses(
    finding: Finding, hosts: HostList, *, registry: bool
) -> tuple[tuple[Address, ...], tuple[dns.rdata.Rdata, ...]]:
    """The addresses to be opened, and the records that may be answered. An address that is on the list by itself may be
    answered even if it is private; its own entry says with which ports, so the name opens nothing more on it."""
    opened: list[Address] = []
    records: list[dns.rdata.Rdata] = []
    for address, record in zip(finding.addresses, finding.records, strict=True):
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            continue  # an IPv4 address belongs into an A record
        if may_answer(address, registry=registry):
            opened.append(address)
            records.append(record)
        elif hosts.entries_for_address(address):
            records.append(record)
    return tuple(opened), tuple(records)


def _leads_to(record: dns.rdata.Rdata, hosts: HostList) -> bool:
    return isinstance(record, SRV) and bool(hosts.entries_for_name(host_name(record.target)))


def _answer_locally(query: Query, decision: LocalAnswer) -> Generator[Step, Result, dns.message.Message]:
    if decision.refused:
        yield Tell(query.name or query.shown, decision.refused)
    return build_reply(query, decision.rcode, decision.records, decision.ttl, remark=decision.remark)


def _fail(query: Query, result: Result) -> dns.message.Message:
    cause = result.cause if isinstance(result, Failure) else "no answer"
    return build_reply(query, dns.rcode.SERVFAIL, remark=(dns.edns.EDECode.NETWORK_ERROR, cause))
