"""Asking other servers, over real sockets: they fail, lie and fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from k8e.engine.local.dns.answers import Finding
from k8e.engine.local.dns.resolv_conf import Configuration, ResolvConf, Server
from k8e.engine.local.dns.upstream import Upstream, UpstreamFailed
from tests.engine.dns.teacher import Teacher, open_teacher

pytestmark = pytest.mark.anyio

A, AAAA = 1, 28


@pytest.fixture
async def teacher() -> AsyncIterator[Teacher]:
    async with open_teacher() as teacher:
        teacher.teach("example.com", "A", "8.8.4.1", "8.8.4.2", ttl=120)
        yield teacher


@contextlib.asynccontextmanager
async def open_upstream(*servers: Server, **options: object) -> AsyncIterator[Upstream]:
    """Options are those of a resolv.conf."""
    upstream = Upstream(servers, deadline=30)
    upstream._fixed = Configuration(servers=servers, **options)  # type: ignore[arg-type]
    try:
        yield upstream
    finally:
        await upstream.close()


def unused_port() -> Server:
    """An address at which no server listens: the port was free a moment ago and is refused at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return Server(ip_address("127.0.0.1"), sock.getsockname()[1])


@contextlib.contextmanager
def mute() -> Iterator[Server]:
    """A server that takes questions and says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield Server(ip_address("127.0.0.1"), sock.getsockname()[1])


def addresses(finding: Finding) -> list[str]:
    return sorted(str(address) for address in finding.addresses)


async def test_a_name_is_found_and_remembered_with_what_is_left_of_its_life(teacher: Teacher) -> None:
    async with open_upstream(teacher.server) as upstream:
        first = await upstream.ask("example.com", A)
        again = await upstream.ask("example.com", A)
    assert addresses(first) == addresses(again) == ["8.8.4.1", "8.8.4.2"]
    assert (first.ttl, again.ttl <= 120) == (120, True)
    assert teacher.asked == [("example.com", "A")]


async def test_a_name_that_does_not_exist_and_one_without_records(teacher: Teacher) -> None:
    async with open_upstream(teacher.server) as upstream:
        assert not (await upstream.ask("no.example", A)).exists
        assert await upstream.ask("example.com", AAAA) == Finding(True)


async def test_the_same_question_at_the_same_time_is_asked_once(teacher: Teacher) -> None:
    teacher.silence = asyncio.Event()
    async with open_upstream(teacher.server) as upstream:
        tasks = [asyncio.ensure_future(upstream.ask("example.com", A)) for _ in range(50)]
        while not teacher.asked:
            await asyncio.sleep(0.01)
        tasks[0].cancel()  # one who leaves does not take the others along
        teacher.silence.set()
        findings = await asyncio.gather(*tasks[1:])
    assert {tuple(addresses(finding)) for finding in findings} == {("8.8.4.1", "8.8.4.2")}
    assert len(teacher.asked) == 1


async def test_a_cut_answer_is_asked_for_over_tcp(teacher: Teacher) -> None:
    teacher.teach("long.example", "TXT", *(f'"{number}{"x" * 200}"' for number in range(16)))
    async with open_upstream(teacher.server) as upstream:
        assert len((await upstream.ask("long.example", 16)).records) == 16
    assert (len(teacher.asked), teacher.over_tcp) == (2, 1)


async def test_use_vc_asks_over_tcp_only(teacher: Teacher) -> None:
    async with open_upstream(teacher.server, tcp=True) as upstream:
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]
    assert (len(teacher.asked), teacher.over_tcp) == (1, 1)


async def test_the_next_server_is_asked_when_one_is_gone(teacher: Teacher) -> None:
    async with open_upstream(unused_port(), teacher.server) as upstream:
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]


async def test_the_next_server_is_asked_when_one_is_silent_and_that_one_comes_last_for_a_while(
    teacher: Teacher,
) -> None:
    teacher.teach("other.com", "A", "8.8.4.3")
    with mute() as silent:
        async with open_upstream(silent, teacher.server, timeout=0.2) as upstream:
            assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]
            order = upstream._order(upstream.configuration, asyncio.get_running_loop().time())
    assert order == [teacher.server, silent]


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NOTAUTH])
async def test_the_next_server_is_asked_when_one_refuses(teacher: Teacher, rcode: dns.rcode.Rcode) -> None:
    def refuse(query: dns.message.Message, tcp: bool) -> Sequence[bytes]:
        reply = dns.message.make_response(query)
        reply.set_rcode(rcode)
        return [reply.to_wire()]

    async with open_teacher() as grumpy:
        grumpy.trick = refuse
        async with open_upstream(grumpy.server, teacher.server) as upstream:
            assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]
        assert len(grumpy.asked) == 1


async def test_all_fail_and_the_cause_is_told() -> None:
    async with open_upstream(unused_port(), unused_port()) as upstream:
        with pytest.raises(UpstreamFailed, match="refused"):
            await upstream.ask("example.com", A)


async def test_a_deadline_ends_it() -> None:
    with mute() as silent:
        upstream = Upstream([silent], deadline=0.2)
        with pytest.raises(UpstreamFailed, match=r"within 0\.2 s"):
            await upstream.ask("example.com", A)
        await upstream.close()


async def test_a_server_too_old_for_options_is_asked_without(teacher: Teacher) -> None:
    def old(query: dns.message.Message, tcp: bool) -> Sequence[bytes] | None:
        if query.edns < 0:
            return None
        reply = dns.message.make_response(query)
        reply.use_edns(False)
        reply.set_rcode(dns.rcode.FORMERR)
        return [reply.to_wire()]

    teacher.trick = old
    async with open_upstream(teacher.server) as upstream:
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]


def forge(
    query: dns.message.Message, *, number: int | None = None, name: str = "example.com", kind: str = "A"
) -> bytes:
    """An answer that leads elsewhere, for a question that was not asked or under another number."""
    asked = dns.message.make_query(name, kind, id=query.id if number is None else number)
    reply = dns.message.make_response(asked)
    reply.answer = [dns.rrset.from_text(f"{name}.", 300, "IN", "A", "6.6.6.6")]
    return reply.to_wire()


async def test_answers_to_other_questions_are_not_believed(teacher: Teacher) -> None:
    def mislead(query: dns.message.Message, tcp: bool) -> Sequence[bytes]:
        return [
            b"",
            b"short",
            forge(query, number=query.id ^ 1),
            forge(query, name="evil.com"),
            forge(query, kind="AAAA"),
            query.to_wire(),
            teacher.usual(query, tcp),
        ]

    teacher.trick = mislead
    async with open_upstream(teacher.server) as upstream:
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]


async def test_a_server_that_only_misleads_is_given_up(teacher: Teacher) -> None:
    teacher.trick = lambda query, tcp: [forge(query, name="evil.com")] * 40
    async with open_upstream(teacher.server) as upstream:
        with pytest.raises(UpstreamFailed, match="something else"):
            await upstream.ask("example.com", A)


async def test_records_for_other_names_in_a_good_answer_are_not_believed(teacher: Teacher) -> None:
    def stuff(query: dns.message.Message, tcp: bool) -> Sequence[bytes]:
        reply = dns.message.make_response(query)
        extra = dns.rrset.from_text("bank.example.", 300, "IN", "A", "6.6.6.6")
        reply.answer = [extra, dns.rrset.from_text("example.com.", 300, "IN", "A", "8.8.4.9")]
        reply.additional = [extra]
        return [reply.to_wire()]

    teacher.trick = stuff
    async with open_upstream(teacher.server) as upstream:
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.9"]
        teacher.trick = None
        assert not (await upstream.ask("bank.example", A)).exists


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff" * 40,  # a body that is none
        b"",
        b"\x07example\x03com\0\0\1\0\1" + b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\x04\1\2",  # a record that ends too early
        b"\x07example\x03com\0\0\1\0\1" + b"\xc0\x1d\0\1\0\1\0\0\0\x3c\0\x04\1\2\3\4",  # a name that points to itself
    ],
)
@pytest.mark.parametrize("tcp", [False, True])
async def test_rubbish_is_no_answer(teacher: Teacher, packet: bytes, tcp: bool) -> None:
    teacher.trick = lambda query, tcp: [query.id.to_bytes(2) + b"\x81\x80\0\1\0\1\0\0\0\0" + packet]
    async with open_upstream(teacher.server, tcp=tcp) as upstream:
        with pytest.raises(UpstreamFailed, match=r"unreadable|something else"):
            await upstream.ask("example.com", A)


async def test_an_answer_without_end_is_not_read(teacher: Teacher) -> None:
    teacher.trick = lambda query, tcp: [query.id.to_bytes(2) + b"\x81\x80" + b"\0" * 60_000]
    async with open_upstream(teacher.server, tcp=True) as upstream:
        with pytest.raises(UpstreamFailed, match="60004 bytes"):
            await upstream.ask("example.com", A)


async def test_a_server_that_hangs_up_is_no_answer(teacher: Teacher) -> None:
    teacher.trick = lambda query, tcp: []
    async with open_upstream(teacher.server, tcp=True) as upstream:
        with pytest.raises(UpstreamFailed, match="hung up"):
            await upstream.ask("example.com", A)


async def test_a_short_name_is_found_with_the_machines_suffixes(teacher: Teacher) -> None:
    teacher.teach("mirror.lab.example", "A", "10.0.0.1")
    async with open_upstream(teacher.server, search=("corp.example", "lab.example")) as upstream:
        assert addresses(await upstream.ask("mirror", A)) == ["10.0.0.1"]
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1", "8.8.4.2"]
        assert not (await upstream.ask("no.example", A)).exists
    assert [name for name, _ in teacher.asked] == [
        "mirror.corp.example",
        "mirror.lab.example",
        "example.com",
        "no.example",
    ]


async def test_rotate_begins_with_another_server_each_time(teacher: Teacher) -> None:
    async with open_teacher() as second:
        async with open_upstream(teacher.server, second.server, rotate=True) as upstream:
            for number in range(4):
                await upstream.ask(f"n{number}.example", A)
        assert (len(teacher.asked), len(second.asked)) == (2, 2)


async def test_another_resolv_conf_counts_at_once_and_the_old_answers_are_forgotten(tmp_path: Path) -> None:
    async with open_teacher() as home, open_teacher() as office:
        home.teach("example.com", "A", "8.8.4.1")
        office.teach("example.com", "A", "8.8.4.2")
        current = [home.server]

        class File(ResolvConf):
            """Ports cannot be written in a resolv.conf."""

            def current(self) -> Configuration:
                return Configuration(servers=tuple(current))

        upstream = Upstream(resolv_conf=File())
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1"]
        current[:] = [office.server]
        assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.2"]
        await upstream.close()


async def test_a_server_on_ipv6_and_one_in_a_zone_that_does_not_exist() -> None:
    async with open_teacher("::1") as teacher:
        teacher.teach("example.com", "A", "8.8.4.1")
        lost = Server(ip_address("fe80::1%nosuchif0"), 53)
        zoned = Server(ip_address("::1%lo"), teacher.server.port)
        for server in (teacher.server, zoned):
            async with open_upstream(lost, server) as upstream:
                assert addresses(await upstream.ask("example.com", A)) == ["8.8.4.1"]


async def test_closing_ends_questions_under_way(teacher: Teacher) -> None:
    teacher.silence = asyncio.Event()
    async with open_upstream(teacher.server) as upstream:
        question = asyncio.ensure_future(upstream.ask("example.com", A))
        while not teacher.asked:
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await question
