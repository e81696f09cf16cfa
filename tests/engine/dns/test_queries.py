"""Queries that a sandbox may send, most of them on purpose."""

from __future__ import annotations

import struct

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.update
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e.engine.local.dns.queries import HEADER, MAX_QUERY, Mistake, Query, host_name, read_query

PLAIN = dns.message.make_query("example.com", "A", id=7).to_wire()


def header(packet: bytes, **fields: int) -> bytes:
    """The packet with other numbers in its header."""
    names = ("id", "flags", "questions", "answers", "authorities", "additionals")
    numbers = dict(zip(names, HEADER.unpack_from(packet), strict=True)) | fields
    return HEADER.pack(*numbers.values()) + packet[HEADER.size :]


def rcode(result: Query | Mistake) -> dns.rcode.Rcode:
    assert isinstance(result, Mistake)
    return dns.message.from_wire(result.reply).rcode()


def test_a_question_is_read() -> None:
    query = read_query(dns.message.make_query("Example.COM", "AAAA", use_edns=0, payload=4000).to_wire())
    assert isinstance(query, Query)
    assert (query.name, query.shown, query.kind, query.room) == ("example.com", "example.com", 28, 1232)


@pytest.mark.parametrize(("payload", "room"), [(0, 512), (1, 512), (512, 512), (900, 900), (65535, 1232)])
def test_a_reply_is_as_long_as_the_client_takes_and_networks_carry(payload: int, room: int) -> None:
    query = read_query(dns.message.make_query("example.com", "A", use_edns=0, payload=payload).to_wire())
    assert isinstance(query, Query)
    assert query.room == room


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0" * 11,
        header(PLAIN, flags=0x8180),  # an answer: answering it could go on for ever
        PLAIN + bytes(MAX_QUERY),
    ],
)
def test_noise_gets_no_answer(packet: bytes) -> None:
    assert read_query(packet) == Mistake()


@pytest.mark.parametrize(
    "packet",
    [
        PLAIN[:12],
        PLAIN[:-1],
        PLAIN + b"x",
        header(PLAIN, questions=0),
        header(PLAIN, questions=2),
        header(PLAIN, questions=65535),
        header(PLAIN, answers=1),
        header(PLAIN, authorities=1),
        header(PLAIN, additionals=65535),
        header(PLAIN, additionals=1),
        header(b"\0" * 12 + b"\xc0\x0c\0\1\0\1", questions=1),  # a name that points to itself
        header(b"\0" * 12 + b"\x01a\xc0\x0c\0\1\0\1", questions=1),
        header(b"\0" * 12 + b"\x80\0\0\1\0\1", questions=1),
        header(b"\0" * 12 + b"\x3f" + b"a" * 63 + (b"\x3f" + b"a" * 63) * 4 + b"\0\0\1\0\1", questions=1),
        # Two sets of options; options of a name; an address behind the question.
        header(PLAIN, additionals=2) + b"\0\0\x29\x04\xd0\0\0\0\0\0\0" * 2,
        header(PLAIN, additionals=1) + b"\x01a\0\0\x29\x04\xd0\0\0\0\0\0\0",
        header(PLAIN, additionals=1) + b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4\1\2\3\4",
    ],
)
def test_a_malformed_question_is_told_so_in_a_header(packet: bytes) -> None:
    result = read_query(packet)
    assert rcode(result) == dns.rcode.FORMERR
    assert isinstance(result, Mistake)
    assert len(result.reply) == HEADER.size


def test_what_is_no_query_is_not_implemented() -> None:
    for opcode in (dns.opcode.IQUERY, dns.opcode.STATUS, dns.opcode.NOTIFY, 15):
        assert rcode(read_query(header(PLAIN, flags=opcode << 11))) == dns.rcode.NOTIMP
    update = dns.update.UpdateMessage("example.com")
    update.add("www", 300, "A", "192.0.2.1")
    assert rcode(read_query(update.to_wire())) == dns.rcode.NOTIMP


def test_other_classes_are_refused() -> None:
    assert rcode(read_query(dns.message.make_query("version.bind", "TXT", "CH").to_wire())) == dns.rcode.REFUSED
    assert rcode(read_query(dns.message.make_query("example.com", "A", "ANY").to_wire())) == dns.rcode.REFUSED


def test_a_later_edns_is_told_which_one_we_speak() -> None:
    result = read_query(dns.message.make_query("example.com", "A", use_edns=1).to_wire())
    assert rcode(result) == dns.rcode.BADVERS


def test_unknown_options_are_ignored() -> None:
    options = [dns.edns.GenericOption("65001", b"x" * 100), dns.edns.ECSOption("192.0.2.0", 24)]
    query = read_query(dns.message.make_query("example.com", "A", use_edns=0, options=options).to_wire())
    assert isinstance(query, Query)


@pytest.mark.parametrize(
    "labels",
    [
        (b"allowed.com", b""),  # one label with a dot in it is not two
        (b"allowed\0", b"com", b""),
        (b"allowed", b"com\x00evil", b""),
        (b"allo wed", b"com", b""),
        (b"allowed\n", b"com", b""),
        (b"\xc3\xbcber", b"com", b""),
        (b"*", b"com", b""),
        (b"127", b"1", b""),
    ],
)
def test_what_looks_like_a_name_and_is_none_has_no_form_for_lists(labels: tuple[bytes, ...]) -> None:
    assert host_name(dns.name.Name(labels)) == ""


def test_the_root_has_no_form_either() -> None:
    assert host_name(dns.name.root) == ""


MUTATIONS = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=6)


@given(st.binary(max_size=600))
@example(b"\0\0\1\0\0\1\0\0\0\0\0\1\0\0\1\0\1\0\0\x29\0\0\0\0\0\0\0\4\0\x08\0\0")
def test_no_packet_breaks_the_reader(packet: bytes) -> None:
    check(packet)


@given(st.binary(max_size=200), st.integers(0, 2))
def test_no_body_behind_a_good_header_does(body: bytes, additionals: int) -> None:
    check(HEADER.pack(1, dns.flags.RD, 1, 0, 0, additionals) + body)


@given(MUTATIONS)
def test_no_change_of_a_good_question_does(mutations: list[tuple[int, int]]) -> None:
    options = [dns.edns.GenericOption("COOKIE", b"12345678"), dns.edns.ECSOption("2001:db8::", 56)]
    packet = bytearray(dns.message.make_query("a.example.com", "HTTPS", use_edns=0, options=options).to_wire())
    for place, value in mutations:
        packet[place % len(packet)] = value
    check(bytes(packet))


@given(st.integers(0, 65535), st.binary(max_size=60))
def test_no_option_does(number: int, data: bytes) -> None:
    options = struct.pack("!HH", number, len(data)) + data
    check(header(PLAIN, additionals=1) + b"\0" + struct.pack("!HHIH", 41, 1232, 0, len(options)) + options)


def check(packet: bytes) -> None:
    """Whatever it is: no more bytes go out than came in, beyond the smallest set of options."""
    result = read_query(packet)
    if isinstance(result, Mistake):
        assert len(result.reply) <= len(packet) + 11
        assert not result.reply or result.reply[:2] == packet[:2]
    else:
        assert result.name == result.name.lower()
        assert result.shown.isprintable()
