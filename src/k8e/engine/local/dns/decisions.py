"""Decides what becomes of a query, from the query and the sandbox's list alone.

The order is the policy: names that every machine answers itself, names that no list opens, the list, the type.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import dns.edns
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype

from k8e.engine.local.dns.queries import Query
from k8e.policy import HostEntry, HostList, is_metadata_name

NAME_NOT_LISTED = "name_not_listed"
INVALID_NAME = "invalid_name"
METADATA = "metadata"
ADDRESS_NOT_PUBLIC = "address_not_public"

ADDRESS_KINDS = frozenset({dns.rdatatype.A, dns.rdatatype.AAAA})
ASKED_KINDS = ADDRESS_KINDS | {dns.rdatatype.SRV, dns.rdatatype.TXT}

Remark = tuple[dns.edns.EDECode, str]


@dataclass(frozen=True, slots=True)
class Rules:
    """The list of a sandbox at this moment, with what else a decision depends on."""

    hosts: HostList
    mirrors: frozenset[str] = frozenset()  # registries of the machine: may have private addresses
    hostname: str = ""  # the sandbox's own
    search: tuple[str, ...] = ()  # the machine's suffixes: a client may have added one
    refused: Collection[str] = ()  # names that were refused a moment ago


@dataclass(frozen=True, slots=True)
class Forward:
    """Upstream is asked, on behalf of these entries."""

    entries: tuple[HostEntry, ...]


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """Answered here and now; no packet leaves the machine."""

    rcode: dns.rcode.Rcode = dns.rcode.NOERROR
    records: tuple[dns.rdata.Rdata, ...] = ()
    ttl: int = 0
    remark: Remark | None = None
    refused: str = ""  # the reason, when it is a refusal to be told


def decide(query: Query, rules: Rules) -> Forward | LocalAnswer:
    name = query.name
    if not name:
        if query.shown != ".":
            return _refuse(INVALID_NAME, "this is not a host name")
        return LocalAnswer(dns.rcode.REFUSED)  # the root: of no use to a client that does not resolve names itself
    if 128 <= query.kind < dns.rdatatype.ANY:
        return LocalAnswer(dns.rcode.REFUSED)  # zone transfers and their like
    if name == "localhost" or name.endswith(".localhost") or name == rules.hostname:
        return LocalAnswer(records=_loopback(query.kind), ttl=3600)
    if name == "arpa" or name.endswith(".arpa"):
        return _reverse(name, query.kind)
    if is_metadata_name(name):
        return _refuse(METADATA, "cloud metadata is never reachable from a sandbox")
    if not (entries := entries_for(query, rules.hosts)):
        quiet = is_search_noise(name, rules)
        return _refuse("" if quiet else NAME_NOT_LISTED, "this name is not on the sandbox's list of allowed hosts")
    if query.kind in ASKED_KINDS:
        return Forward(entries)
    if query.kind == dns.rdatatype.ANY:
        return LocalAnswer(records=(_record("HINFO", '"RFC8482" ""'),), ttl=3600)
    # HTTPS and SVCB above all: with their hints and targets a client would connect to addresses that are not open.
    return LocalAnswer(
        remark=(dns.edns.EDECode.FILTERED, "of an allowed name only A, AAAA, SRV and TXT are answered here")
    )


def entries_for(query: Query, hosts: HostList) -> tuple[HostEntry, ...]:
    """`_service._tcp.name` is the SRV record of the name, not a host below it."""
    if entries := hosts.entries_for_name(query.name):
        return entries
    labels = query.name.split(".", 2)
    if query.kind == dns.rdatatype.SRV and len(labels) == 3 and labels[1] == "_tcp" and _is_service(labels[0]):
        return hosts.entries_for_name(labels[2])
    return ()


def _is_service(label: str) -> bool:
    """RFC 6335: at most fifteen letters. A longer label could carry data out."""
    return label.startswith("_") and len(label) <= 16


def is_search_noise(name: str, rules: Rules) -> bool:
    """Whether a client's search list made this of a name that was answered or refused already."""
    stems = (name.removesuffix("." + suffix) for suffix in rules.search)
    return any(stem != name and (stem in rules.refused or rules.hosts.entries_for_name(stem)) for stem in stems)


def _refuse(reason: str, text: str) -> LocalAnswer:
    # NXDOMAIN, and not REFUSED: to glibc and Go that is a broken server to be asked again, to musl no answer at all.
    return LocalAnswer(dns.rcode.NXDOMAIN, remark=(dns.edns.EDECode.BLOCKED, text), refused=reason)


def _record(kind: str, text: str) -> dns.rdata.Rdata:
    return dns.rdata.from_text(dns.rdataclass.IN, kind, text)


def _loopback(kind: int) -> tuple[dns.rdata.Rdata, ...]:
    if kind == dns.rdatatype.A:
        return (_record("A", "127.0.0.1"),)
    if kind == dns.rdatatype.AAAA:
        return (_record("AAAA", "::1"),)
    return ()


_LOOPBACK_REVERSE = ("1.0.0.127.in-addr.arpa", "1." + "0." * 31 + "ip6.arpa")


def _reverse(name: str, kind: int) -> LocalAnswer:
    """Addresses have no names here. Not reported as a refusal: libraries look up their own address without need."""
    if name in _LOOPBACK_REVERSE:
        return LocalAnswer(records=(_record("PTR", "localhost."),) if kind == dns.rdatatype.PTR else (), ttl=3600)
    return LocalAnswer(
        dns.rcode.NXDOMAIN, remark=(dns.edns.EDECode.FILTERED, "addresses are not turned into names here")
    )
