"""Answers that upstream may send, honest or not."""

from __future__ import annotations

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine.local.dns.answers import MAX_RECORDS, BadAnswer, Finding, build_reply, encode_reply, read_answer
from k8e.engine.local.dns.queries import Query, read_query
from k8e.engine.local.dns.upstream import Cache

NAME = dns.name.from_text("example.com.")
SOA = "example.com. 900 IN SOA ns. admin. 1 2 3 4 30"


def message(*records: str, rcode: str = "NOERROR", authority: str = "") -> dns.message.Message:
    lines = [f"rcode {rcode}", "flags QR RD RA", ";QUESTION", "example.com. IN A", ";ANSWER", *records]
    return dns.message.from_text("\n".join([*lines, ";AUTHORITY", authority]))


def read(*records: str, rcode: str = "NOERROR", authority: str = "") -> Finding:
    return read_answer(message(*records, rcode=rcode, authority=authority), NAME, dns.rdatatype.A)


def addresses(finding: Finding) -> list[str]:
    return [str(address) for address in finding.addresses]


def test_the_records_of_the_name_and_type_are_taken_and_no_others() -> None:
    finding = read(
        "example.com. 60 IN A 8.8.4.1",
        "example.com. 50 IN A 8.8.4.2",
        "example.com. 60 IN AAAA 2606:4700::1",
        "other.com. 60 IN A 8.8.4.3",
        "sub.example.com. 60 IN A 8.8.4.4",
    )
    assert addresses(finding) == ["8.8.4.1", "8.8.4.2"]
    assert finding.ttl == 50


def test_a_chain_of_aliases_counts_for_the_name_with_its_shortest_life() -> None:
    finding = read(
        "c.net. 500 IN A 8.8.4.1",
        "b.net. 40 IN CNAME c.net.",
        "example.com. 300 IN CNAME B.net.",
    )
    assert addresses(finding) == ["8.8.4.1"]
    assert finding.ttl == 40


def test_a_chain_that_leads_out_of_the_answer_is_not_followed() -> None:
    finding = read("example.com. 300 IN CNAME elsewhere.net.", "unrelated.net. 60 IN A 8.8.4.1")
    assert (finding.exists, finding.records) == (True, ())


@pytest.mark.parametrize(
    "records",
    [
        ["example.com. 60 IN CNAME example.com."],
        ["example.com. 60 IN CNAME a.net.", "a.net. 60 IN CNAME example.com."],
        [f"{'example.com.' if n == 0 else f'n{n}.net.'} 60 IN CNAME n{n + 1}.net." for n in range(40)]
        + ["n40.net. 60 IN A 8.8.4.1"],
    ],
)
def test_circles_and_endless_chains_are_no_answer(records: list[str]) -> None:
    with pytest.raises(BadAnswer):
        read(*records)


def test_thousands_of_records_become_a_few() -> None:
    finding = read(*(f"example.com. 60 IN A 8.{n >> 8}.{n & 255}.1" for n in range(4000)))
    assert len(finding.records) == MAX_RECORDS


@pytest.mark.parametrize(("ttl", "kept"), [(0, 1), (1, 1), (3600, 3600), (86400, 3600)])
def test_a_life_is_between_a_second_and_an_hour(ttl: int, kept: int) -> None:
    assert read(f"example.com. {ttl} IN A 8.8.4.1").ttl == kept


def test_a_negative_answer_lives_as_its_zone_says_and_not_at_all_when_it_does_not() -> None:
    assert read(rcode="NXDOMAIN", authority=SOA) == Finding(False, (), 30)
    assert read(authority=SOA) == Finding(True, (), 30)
    assert read(rcode="NXDOMAIN") == Finding(False, (), 0)
    assert read(authority=SOA.replace(" 30", " 99999").replace(" 900 ", " 99999 ")).ttl == 60


@pytest.mark.parametrize("rcode", ["SERVFAIL", "REFUSED", "NOTAUTH", "FORMERR"])
def test_an_error_is_no_answer(rcode: str) -> None:
    with pytest.raises(BadAnswer, match=rcode):
        read("example.com. 60 IN A 8.8.4.1", rcode=rcode)


RECORDS = st.sampled_from(
    ["example.com. 9 IN CNAME a.", "a. 9 IN CNAME b.", "b. 9 IN CNAME a.", "a. 9 IN A 8.8.4.1", "b. 9 IN A 8.8.4.2",
     "example.com. 9 IN A 8.8.4.3", "example.com. 9 IN CNAME b.", "example.com. 9 IN TXT x"]
)  # fmt: skip


@given(st.lists(RECORDS, max_size=8))
def test_no_order_of_records_makes_it_hang_or_invent(records: list[str]) -> None:
    try:
        finding = read(*records)
    except (BadAnswer, dns.exception.DNSException):
        return
    text = " ".join(records)
    assert all(address in text for address in addresses(finding))


@given(st.binary(max_size=300))
def test_no_packet_of_a_server_breaks_the_reader(body: bytes) -> None:
    wire = message("example.com. 60 IN A 8.8.4.1").to_wire()
    try:
        parsed = dns.message.from_wire(wire[: len(wire) - len(body) % len(wire)] + body, ignore_trailing=True)
        read_answer(parsed, NAME, dns.rdatatype.A)
    except (BadAnswer, dns.exception.DNSException):
        pass


def question(name: str = "example.com", kind: str = "A", *, edns: bool = False) -> Query:
    query = read_query(dns.message.make_query(name, kind, use_edns=0 if edns else None).to_wire())
    assert isinstance(query, Query)
    return query


def test_what_does_not_fit_is_said_to_be_cut() -> None:
    records = [dns.rdata.from_text("IN", "AAAA", f"2606:4700::{n}") for n in range(16)]
    query = question("a" * 60 + "." + "b" * 60 + "." + "c" * 60 + ".example.com", "AAAA")
    wire = encode_reply(build_reply(query, records=records, ttl=60), query.room)
    cut = dns.message.from_wire(wire)
    assert len(wire) <= 512
    assert cut.flags & dns.flags.TC
    assert not cut.answer


def test_sixteen_addresses_of_a_usual_name_fit_into_the_smallest_packet() -> None:
    records = [dns.rdata.from_text("IN", "AAAA", f"2606:4700::{n}") for n in range(16)]
    query = question(kind="AAAA")
    reply = dns.message.from_wire(encode_reply(build_reply(query, records=records, ttl=60), query.room))
    assert len(reply.answer[0]) == 16


def test_the_name_comes_back_as_it_was_written() -> None:
    query = question("eXaMpLe.CoM")
    reply = build_reply(query, records=[dns.rdata.from_text("IN", "A", "8.8.4.1")], ttl=60)
    assert b"\x07eXaMpLe\x03CoM" in encode_reply(reply, 512)


def test_the_cache_forgets_in_time_and_keeps_to_its_size() -> None:
    cache = Cache(size=2)
    found = read("example.com. 60 IN A 8.8.4.1", "example.com. 60 IN A 8.8.4.2")
    cache.put(("a", 1), found, now=100)
    cache.put(("b", 1), found, now=100)
    hit = cache.get(("a", 1), now=130.5)
    assert hit is not None
    assert (hit.ttl, sorted(addresses(hit))) == (29, ["8.8.4.1", "8.8.4.2"])
    cache.put(("c", 1), found, now=131)
    assert cache.get(("b", 1), now=131) is None, "the one that was not asked for the longest goes first"
    assert cache.get(("a", 1), now=159.9) is not None
    assert cache.get(("a", 1), now=160) is None
    cache.put(("d", 1), Finding(False), now=160)
    assert cache.get(("d", 1), now=160) is None, "what says nothing about its life is not kept"
