"""Reads the answers of upstream with suspicion, and builds the replies to sandboxes from scratch.

Nothing of an upstream packet is passed on but the records that were asked for, under the name that was asked for: a
chain of CNAMEs is followed within the packet and left out, so that name, addresses and the kernel's set agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from k8e.engine.local.dns.queries import LARGEST_REPLY, Query
from k8e.policy import Address

MAX_CHAIN = 16
MAX_RECORDS = 16  # sixteen addresses are choice enough, and they fit into one packet
MIN_TTL, MAX_TTL = 1, 3600
MAX_NEGATIVE_TTL = 60


class BadAnswer(Exception):
    """The packet of a server is no answer to the query."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of upstream for a name and a type."""

    exists: bool  # False: there is no such name, for any type
    records: tuple[dns.rdata.Rdata, ...] = ()
    ttl: int = 0  # seconds for which this may be remembered; 0: not at all

    def aged(self, seconds: float) -> Finding:
        return replace(self, ttl=max(MIN_TTL, int(self.ttl - seconds)))

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(ip_address(record.to_text()) for record in self.records)


def read_answer(message: dns.message.Message, asked: dns.name.Name, kind: int) -> Finding:
    """Follows the aliases that the message itself contains, and no others."""
    rcode = message.rcode()
    if rcode not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        raise BadAnswer(f"the server answers {dns.rcode.to_text(rcode)}")
    aliases: dict[dns.name.Name, dns.rrset.RRset] = {}
    wanted: dict[dns.name.Name, dns.rrset.RRset] = {}
    for rrset in message.answer:
        if rrset.rdclass != dns.rdataclass.IN:
            continue
        if rrset.rdtype == kind:
            wanted.setdefault(rrset.name, rrset)
        elif rrset.rdtype == dns.rdatatype.CNAME:
            aliases.setdefault(rrset.name, rrset)
    name, ttl = asked, MAX_TTL
    for _ in range(MAX_CHAIN):
        if name in wanted:
            records = wanted[name]
            return Finding(True, tuple(records)[:MAX_RECORDS], max(MIN_TTL, min(ttl, records.ttl)))
        if name not in aliases:
            exists = rcode == dns.rcode.NOERROR
            return Finding(exists, ttl=_negative_ttl(message, ttl))
        ttl = min(ttl, aliases[name].ttl)
        name = aliases[name][0].target
    raise BadAnswer("the aliases of the name go round in circles")


def _negative_ttl(message: dns.message.Message, ttl: int) -> int:
    """RFC 2308: as the zone's SOA says, and not at all without one."""
    for rrset in message.authority:
        if rrset.rdtype == dns.rdatatype.SOA:
            minimum: int = rrset[0].minimum
            return max(MIN_TTL, min(ttl, rrset.ttl, minimum, MAX_NEGATIVE_TTL))
    return 0


def build_reply(
    query: Query,
    rcode: dns.rcode.Rcode = dns.rcode.NOERROR,
    records: Sequence[dns.rdata.Rdata] = (),
    ttl: int = 0,
    *,
    remark: tuple[dns.edns.EDECode, str] | None = None,
) -> dns.message.Message:
    """Negative replies carry no SOA, so that no client inside keeps them: a name allowed a second later is found."""
    reply = dns.message.make_response(query.message, recursion_available=True, our_payload=LARGEST_REPLY, pad=0)
    reply.set_rcode(rcode)
    if records:
        reply.answer.append(dns.rrset.from_rdata_list(query.message.question[0].name, ttl, records))
    if remark is not None and query.message.edns >= 0:
        reply.use_edns(0, payload=LARGEST_REPLY, options=[dns.edns.EDEOption(*remark)])
    return reply


def encode_reply(reply: dns.message.Message, room: int) -> bytes:
    """Leaves out records that do not fit and sets TC, so that the client asks again over TCP."""
    try:
        return reply.to_wire(max_size=room)
    except dns.exception.TooBig:
        reply.answer.clear()
        reply.flags |= dns.flags.TC
        return reply.to_wire(max_size=room)
