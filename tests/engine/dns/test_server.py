"""The resolver over real sockets, against a name server of the tests' own."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv6Address

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest

from k8e.engine.local.dns.resolv_conf import Configuration, ResolvConf
from k8e.engine.local.dns.upstream import Upstream
from k8e.policy import Address, HostList
from tests.engine.dns.rig import Resolver, open_resolver, texts
from tests.engine.dns.teacher import Teacher, open_teacher

pytestmark = pytest.mark.anyio


@pytest.fixture
async def teacher() -> AsyncIterator[Teacher]:
    async with open_teacher() as teacher:
        teacher.teach("example.com", "A", "8.8.4.1", "8.8.4.2", ttl=120)
        teacher.teach("example.com", "AAAA", "2606:4700::1")
        yield teacher


@pytest.fixture
async def resolver(teacher: Teacher) -> AsyncIterator[Resolver]:
    async with open_resolver(teacher.server) as resolver:
        yield resolver


async def test_a_listed_name_is_admitted_and_then_answered(resolver: Resolver) -> None:
    await resolver.serve("s1", "example.com", "*.example.com", "example.com:8443")
    reply = await resolver.ask("s1", "Example.COM")
    assert texts(reply) == ["8.8.4.1", "8.8.4.2"]
    assert reply.answer[0].ttl == 120
    assert [(entry, name, sorted(found), ttl) for _, entry, name, found, ttl in resolver.admitted] == [
        ("example.com", "example.com", ["8.8.4.1", "8.8.4.2"], 120.0),
        ("example.com:8443", "example.com", ["8.8.4.1", "8.8.4.2"], 120.0),
    ]
    assert resolver.refused == []


async def test_a_name_that_is_not_listed_never_leaves_the_machine(resolver: Resolver, teacher: Teacher) -> None:
    await resolver.serve("s1", "example.com")
    for name in ("evil.com", "example.com.evil.com", "notexample.com", "sub.example.com", "a" * 63 + ".evil.com"):
        for kind in ("A", "AAAA", "TXT", "ANY", "HTTPS", "SRV", "NS"):
            reply = await resolver.ask("s1", name, kind)
            assert reply.rcode() == dns.rcode.NXDOMAIN
            assert not reply.answer
            assert not reply.authority
            (remark,) = reply.options
            assert isinstance(remark, dns.edns.EDEOption)
            assert remark.code == dns.edns.EDECode.BLOCKED
            assert resolver.refused[-1] == ("s1", name, "name_not_listed")
    assert teacher.asked == []
    assert resolver.admitted == []


async def test_the_answer_waits_until_the_kernel_knows(resolver: Resolver) -> None:
    await resolver.serve("s1", "example.com")
    begun, known = asyncio.Event(), asyncio.Event()

    async def on_admit() -> None:
        begun.set()
        await known.wait()

    resolver.on_admit = on_admit
    question = asyncio.ensure_future(resolver.ask("s1", "example.com"))
    await begun.wait()
    # Answered behind it: the resolver is alive, and the first answer is still held back.
    assert (await resolver.ask("s1", "evil.com")).rcode() == dns.rcode.NXDOMAIN
    assert not question.done()
    known.set()
    assert len(texts(await question)) == 2


async def test_what_the_kernel_does_not_know_is_not_answered(resolver: Resolver) -> None:
    await resolver.serve("s1", "example.com")

    async def on_admit() -> None:
        raise OSError("nft is gone")

    resolver.on_admit = on_admit
    reply = await resolver.ask("s1", "example.com")
    assert reply.rcode() == dns.rcode.SERVFAIL
    assert not reply.answer


async def test_each_sandbox_has_its_own_list_and_a_new_list_holds_at_once(resolver: Resolver) -> None:
    await resolver.serve("s1", "example.com")
    await resolver.serve("s2")
    assert (await resolver.ask("s1", "example.com")).rcode() == dns.rcode.NOERROR
    assert (await resolver.ask("s2", "example.com")).rcode() == dns.rcode.NXDOMAIN
    resolver.server.set_hosts("s1", HostList())
    resolver.server.set_hosts("s2", HostList.parse(["example.com"]))
    assert (await resolver.ask("s1", "example.com")).rcode() == dns.rcode.NXDOMAIN
    assert (await resolver.ask("s2", "example.com")).rcode() == dns.rcode.NOERROR


async def test_a_name_that_is_taken_off_the_list_while_it_is_asked_for_is_not_opened(
    resolver: Resolver, teacher: Teacher
) -> None:
    await resolver.serve("s1", "example.com")
    teacher.silence = asyncio.Event()
    question = asyncio.ensure_future(resolver.ask("s1", "example.com"))
    while not teacher.asked:
        await asyncio.sleep(0.01)
    resolver.server.set_hosts("s1", HostList())
    teacher.silence.set()
    assert (await question).rcode() == dns.rcode.NXDOMAIN
    assert resolver.admitted == []


async def test_over_tcp_it_is_the_same(resolver: Resolver) -> None:
    await resolver.serve("s1", "example.com")
    query = dns.message.make_query("example.com", "AAAA")
    reply = dns.message.from_wire(await resolver.send_over_tcp("s1", query.to_wire()))
    assert query.is_response(reply)
    assert texts(reply) == ["2606:4700::1"]


async def test_a_sandbox_that_left_is_not_answered_and_its_address_is_free(resolver: Resolver) -> None:
    address = await resolver.serve("s1", "example.com")
    await resolver.server.leave("s1")
    await resolver.server.leave("s1")
    with pytest.raises(ConnectionRefusedError):
        await resolver.ask("s1", "example.com")
    await resolver.server.serve("s2", [address], HostList.parse(["example.com"]))
    resolver.addresses["s2"] = address
    assert (await resolver.ask("s2", "example.com")).rcode() == dns.rcode.NOERROR


async def test_an_address_in_use_is_an_error_and_leaves_nothing_open(resolver: Resolver) -> None:
    taken = await resolver.serve("s1", "example.com")
    free = await resolver.serve("s2", "example.com")
    await resolver.server.leave("s2")
    with pytest.raises(OSError, match="in use"):
        await resolver.server.serve("s3", [free, taken], HostList())
    await resolver.server.serve("s3", [free], HostList())


async def test_a_long_answer_is_cut_over_udp_and_whole_over_tcp(resolver: Resolver, teacher: Teacher) -> None:
    await resolver.serve("s1", "example.com")
    teacher.teach("example.com", "TXT", *(f'"{number}{"x" * 200}"' for number in range(9)))
    assert (await resolver.ask("s1", "example.com", "TXT")).flags & dns.flags.TC
    query = dns.message.make_query("example.com", "TXT")
    reply = dns.message.from_wire(await resolver.send_over_tcp("s1", query.to_wire()))
    assert len(texts(reply)) == 9
    assert not reply.flags & dns.flags.TC


async def test_listening_begins_before_the_address_is_there(resolver: Resolver) -> None:
    number = random.randrange(1 << 16)
    absent: list[Address] = [
        IPv4Address((198 << 24) + (18 << 16) + number),
        IPv6Address((0xFD << 120) + (0xB8 << 64) + number),
    ]
    for address in absent:
        with pytest.raises(OSError, match="assign"), socket.socket(
            socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM
        ) as plain:  # fmt: skip
            plain.bind((str(address), 0))
    await resolver.server.serve("s1", absent, HostList())


async def test_over_ipv6_it_is_the_same(teacher: Teacher) -> None:
    port = random.randrange(20_000, 32_000)
    async with open_resolver(teacher.server, port=port) as resolver:
        await resolver.server.serve("s1", [IPv6Address("::1")], HostList.parse(["example.com"]))
        query = dns.message.make_query("example.com", "A")
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as client:
            client.connect(("::1", port))
            await loop.sock_sendall(client, query.to_wire())
            async with asyncio.timeout(30):
                reply = dns.message.from_wire(await loop.sock_recv(client, 4096))
        assert texts(reply) == ["8.8.4.1", "8.8.4.2"]


async def test_a_client_that_goes_through_the_machines_suffixes_is_told_once(teacher: Teacher) -> None:
    class File(ResolvConf):
        """Ports cannot be written in a resolv.conf."""

        def current(self) -> Configuration:
            return Configuration(servers=(teacher.server,), search=("corp.example", "lab.example"))

    async with open_resolver(upstream=Upstream(resolv_conf=File())) as resolver:
        await resolver.serve("s1", "example.com")
        for name in ("evil.com", "evil.com.corp.example", "evil.com.lab.example", "example.com.lab.example"):
            assert (await resolver.ask("s1", name)).rcode() == dns.rcode.NXDOMAIN
        assert resolver.refused == [("s1", "evil.com", "name_not_listed")]
        # Only what came just before explains it.
        await resolver.ask("s1", "other.com.lab.example")
        assert resolver.refused[1:] == [("s1", "other.com.lab.example", "name_not_listed")]
    assert teacher.asked == []


async def test_what_upstream_cannot_answer_is_an_error_with_a_cause(teacher: Teacher) -> None:
    teacher.trick = lambda query, tcp: [query.id.to_bytes(2) + b"\x81\x82" + bytes(8)]
    async with open_resolver(teacher.server) as resolver:
        await resolver.serve("s1", "example.com")
        reply = await resolver.ask("s1", "example.com")
        assert reply.rcode() == dns.rcode.SERVFAIL
        assert isinstance(reply.options[0], dns.edns.EDEOption)
        assert "SERVFAIL" in str(reply.options[0].text)
        assert resolver.refused == [], "nothing was refused"
