"""Reads the packets of a sandbox strictly: a query, a mistake that gets its error, or noise that gets no answer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype

from k8e.policy import InvalidEntry, canonical_name

# A name has at most 255 bytes, and nothing else belongs into a query but a few options.
MAX_QUERY = 4096
HEADER = struct.Struct("!HHHHHH")
SMALLEST_REPLY = 512  # what every client over UDP takes
LARGEST_REPLY = 1232  # what crosses every network in one piece


@dataclass(frozen=True, slots=True)
class Query:
    message: dns.message.Message
    name: str  # lower case, no trailing dot; empty for the root and for what is no host name
    shown: str  # the name for people: any bytes escaped
    kind: int  # the record type

    @property
    def room(self) -> int:
        """How long a reply over UDP may be."""
        if self.message.edns < 0:
            return SMALLEST_REPLY
        return min(max(self.message.payload, SMALLEST_REPLY), LARGEST_REPLY)


@dataclass(frozen=True, slots=True)
class Mistake:
    """No query that can be answered; `reply` says so, empty: it gets none."""

    reply: bytes = b""


def read_query(wire: bytes) -> Query | Mistake:
    if len(wire) < HEADER.size or len(wire) > MAX_QUERY:
        return Mistake()
    _, flags, questions, answers, authorities, additionals = HEADER.unpack_from(wire)
    if flags & dns.flags.QR:
        return Mistake()  # An answer to an answer can go back and forth for ever.
    if dns.opcode.from_flags(flags) != dns.opcode.QUERY:
        return _mistake(wire, dns.rcode.NOTIMP)
    # The counts are checked before anything is parsed: at most one query and a few options are parsed.
    if questions != 1 or answers or authorities or additionals > 2:
        return _mistake(wire, dns.rcode.FORMERR)
    try:
        message = dns.message.from_wire(wire)
    except (dns.exception.DNSException, ValueError, struct.error):
        return _mistake(wire, dns.rcode.FORMERR)
    if len(message.question) != 1 or message.additional or message.had_tsig:
        return _mistake(wire, dns.rcode.FORMERR)
    question = message.question[0]
    if message.edns > 0:
        reply = dns.message.make_response(message, our_payload=LARGEST_REPLY)
        reply.use_edns(0, payload=LARGEST_REPLY)
        reply.set_rcode(dns.rcode.BADVERS)
        return Mistake(reply.to_wire())
    if question.rdclass != dns.rdataclass.IN:
        return _mistake(wire, dns.rcode.REFUSED)
    return Query(message, host_name(question.name), show_name(question.name), question.rdtype)


def host_name(name: dns.name.Name) -> str:
    """The form in which lists are compared, or nothing: a label with a dot, a NUL or a space in it is on no list."""
    if any(b"." in label or not label.isascii() for label in name.labels):
        return ""
    try:
        return canonical_name(b".".join(name.labels).decode("ascii"))
    except InvalidEntry:
        return ""


def show_name(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True).lower()


def _mistake(wire: bytes, rcode: dns.rcode.Rcode) -> Mistake:
    """Just a header: shorter than anything that asks for it."""
    number, flags, *_ = HEADER.unpack_from(wire)
    kept = flags & (0x7800 | dns.flags.RD)  # the opcode and what the client wished
    return Mistake(HEADER.pack(number, dns.flags.QR | kept | rcode, 0, 0, 0, 0))
