"""Sandboxes that mean harm to the resolver, or to the others that use it."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator

import dns.message
import dns.rcode
import pytest

from k8e.engine.local.dns import listeners
from k8e.engine.local.dns.queries import MAX_QUERY
from k8e.engine.local.dns.rate_limits import (
    ALL_AT_ONCE,
    ALL_RATE,
    ALL_UPSTREAM,
    BURST,
    LEAST_AT_ONCE,
    LEAST_RATE,
    MAX_AT_ONCE,
    MAX_CONNECTIONS,
    RATE,
    UPSTREAM,
    UPSTREAM_AT_ONCE,
    Allowance,
    Load,
    Throttle,
)
from tests.engine.dns.rig import PORT, Resolver, open_resolver, texts
from tests.engine.dns.teacher import Teacher, open_teacher
from tests.shares import seed

pytestmark = pytest.mark.anyio


@pytest.fixture
async def teacher() -> AsyncIterator[Teacher]:
    async with open_teacher() as teacher:
        teacher.teach("example.com", "A", "8.8.4.1")
        yield teacher


@pytest.fixture
async def resolver(teacher: Teacher) -> AsyncIterator[Resolver]:
    async with open_resolver(teacher.server) as resolver:
        await resolver.serve("good", "example.com")
        await resolver.serve("bad", "example.com", "*.example.com")
        yield resolver


async def works(resolver: Resolver, sandbox: str = "good") -> None:
    assert texts(await resolver.ask(sandbox, "example.com")) == ["8.8.4.1"]


async def test_rubbish_does_not_stop_it(resolver: Resolver) -> None:
    dice = random.Random(seed("resolver"))
    good = dns.message.make_query("example.com", "A", use_edns=0).to_wire()
    with resolver.dial("bad") as client:
        for _ in range(200):
            packet = bytearray(good) if dice.random() < 0.7 else bytearray(dice.randbytes(dice.randrange(600)))
            for _ in range(dice.randrange(4) if packet else 0):
                packet[dice.randrange(len(packet))] = dice.randrange(256)
            client.send(bytes(packet))
        client.send(b"")
        client.send(bytes(MAX_QUERY + 100))
        client.send(bytes(60_000))
    await works(resolver)
    await works(resolver, "bad")


async def test_a_flood_of_new_names_goes_upstream_at_a_pace(resolver: Resolver, teacher: Teacher) -> None:
    """Every question is for another name below a wildcard. Others are answered meanwhile."""
    loop = asyncio.get_running_loop()
    began, number = loop.time(), 0
    with resolver.dial("bad") as client:
        while len(teacher.asked) < UPSTREAM_AT_ONCE + 50:
            for _ in range(20):
                number += 1
                client.send(dns.message.make_query(f"n{number}.example.com", "A").to_wire())
            await asyncio.sleep(0.02)
        asked, taken = len(teacher.asked), loop.time() - began
        await works(resolver)
    assert number > asked
    assert asked <= UPSTREAM_AT_ONCE + UPSTREAM * taken + 1
    assert taken >= 45 / UPSTREAM, "fifty more than at once take a second"


async def test_many_that_flood_share_what_the_daemon_reads() -> None:
    load = Load()
    assert load.rate == RATE
    for busy in (1, 5, 20, 1000):
        load.busy = busy
        assert load.rate == max(LEAST_RATE, min(RATE, ALL_RATE / busy))


async def test_a_pace_is_shared_by_a_crowd() -> None:
    load = Load()
    throttle = Throttle(UPSTREAM, 2, load)
    assert throttle.rate == UPSTREAM
    load.busy = 100
    assert throttle.rate == ALL_UPSTREAM / 100
    load.busy = 0
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(throttle.take() for _ in range(12)))
    assert loop.time() - began >= 9.5 / UPSTREAM, "two at once, then one after the other"


async def test_a_flood_of_slow_questions_leaves_others_their_share(resolver: Resolver, teacher: Teacher) -> None:
    await works(resolver)
    await works(resolver, "bad")
    teacher.silence = asyncio.Event()
    before = len(teacher.asked)
    with resolver.dial("bad") as client:
        for number in range(3000):
            try:
                client.send(dns.message.make_query(f"n{number}.example.com", "A").to_wire())
            except BlockingIOError:
                await asyncio.sleep(0)
        while len(teacher.asked) - before < MAX_AT_ONCE:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await works(resolver)  # from what is remembered
            assert (await resolver.ask("good", "evil.com")).rcode() == dns.rcode.NXDOMAIN
        assert len(teacher.asked) - before == MAX_AT_ONCE, "more questions at once than a sandbox may have"
        # And a question of the good one that has to go upstream, past those of the bad one.
        fresh = asyncio.ensure_future(resolver.ask("good", "example.com", "AAAA"))
        while ("example.com", "AAAA") not in teacher.asked:
            await asyncio.sleep(0.01)
        teacher.silence.set()
        assert (await fresh).rcode() == dns.rcode.NOERROR
    await works(resolver, "bad")


async def test_connections_that_say_nothing_are_counted_and_closed(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "PATIENCE", 0.5)
    address = str(resolver.addresses["bad"])
    clients = [await asyncio.open_connection(address, PORT) for _ in range(MAX_CONNECTIONS)]
    for number, (_, writer) in enumerate(clients):
        writer.write(b"\0\x20abc"[: number % 5])
    query = dns.message.make_query("example.com", "A").to_wire()
    assert await resolver.send_over_tcp("good", query)
    # One more of the bad one has to wait until the others are given up; then it is served.
    assert await resolver.send_over_tcp("bad", query)
    for reader, writer in clients:
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_does_not_take_its_answers_is_closed(
    resolver: Resolver, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "PATIENCE", 0.5)
    teacher.teach("example.com", "TXT", *(f'"{number}{"x" * 250}"' for number in range(16)))
    query = dns.message.make_query("example.com", "TXT").to_wire()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (str(resolver.addresses["bad"]), PORT))
        await loop.sock_sendall(client, (struct.pack("!H", len(query)) + query) * listeners.MAX_QUERIES)
        desk = resolver.server._clients["bad"]
        while not desk.allowance.connections:
            await asyncio.sleep(0.01)
        while desk.allowance.connections:
            await asyncio.sleep(0.01)
    await works(resolver, "bad")


@pytest.mark.parametrize("start", [b"\xff\xff", b"\0\0", b"\0\x01x", b"\0\x0c" + b"\xff" * 12])
async def test_a_connection_that_sends_no_question_is_closed(resolver: Resolver, start: bytes) -> None:
    reader, writer = await asyncio.open_connection(str(resolver.addresses["bad"]), PORT)
    writer.write(start)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_connection_ends_after_its_questions(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_QUERIES", 3)
    query = dns.message.make_query("example.com", "A").to_wire()
    reader, writer = await asyncio.open_connection(str(resolver.addresses["bad"]), PORT)
    writer.write((struct.pack("!H", len(query)) + query) * 5)
    async with asyncio.timeout(30):
        answered = 0
        try:
            while head := await reader.readexactly(2):
                await reader.readexactly(int.from_bytes(head))
                answered += 1
        except (EOFError, ConnectionError):
            pass
    assert answered == 3
    writer.close()


async def test_leaving_in_the_middle_of_questions_gives_everything_back(resolver: Resolver, teacher: Teacher) -> None:
    teacher.silence = asyncio.Event()
    with resolver.dial("bad") as client:
        for number in range(10):
            client.send(dns.message.make_query(f"n{number}.example.com", "A").to_wire())
        while len(teacher.asked) < 10:
            await asyncio.sleep(0.01)
        _, writer = await asyncio.open_connection(str(resolver.addresses["bad"]), PORT)
        assert resolver.server._load.busy == 1
        await resolver.server.leave("bad")
        assert resolver.server._load.busy == 0
    writer.close()
    teacher.silence.set()
    await works(resolver)


def test_an_allowance_comes_back_with_time() -> None:
    allowance = Allowance(Load(), now=0.0)
    asked = 0
    while allowance.may_ask(0.0):
        allowance.begin()
        allowance.end()
        asked += 1
    assert asked == BURST
    assert not allowance.may_connect(0.0)
    assert not allowance.may_ask(0.5 / RATE)
    assert allowance.may_ask(1.1 / RATE)
    for _ in range(int(BURST)):
        assert allowance.may_connect(1000.0)
        allowance.connect()
        allowance.disconnect()
    assert not allowance.may_ask(1000.0)


def test_many_at_once_share_and_everybody_keeps_a_little() -> None:
    load = Load()
    many = [Allowance(load, now=0.0) for _ in range(200)]
    first = many[0]
    while first.may_ask(0.0):
        first.begin()
    assert load == Load(busy=1)
    for other in many[1:]:
        assert other.may_ask(0.0)
        other.begin()
    assert load.share == LEAST_AT_ONCE
    assert not first.may_ask(0.0)
    for _ in range(MAX_AT_ONCE):
        first.end()
    assert load.busy == 199
    assert all(other.may_ask(0.0) for other in many)
    for other in many[1:]:
        other.end()
    assert load.busy == 0
    assert load.share == min(MAX_AT_ONCE, ALL_AT_ONCE)
