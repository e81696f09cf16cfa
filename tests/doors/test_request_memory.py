"""Bytes of requests in memory: of one user and of all, from their arrival to their answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import h11
import pytest

from k8e.core.access.access import Payer
from k8e.core.errors import Fault
from k8e.doors.grpc.buffered_bytes import BufferedBytes, estimate_head, estimate_message
from k8e.doors.http.frames import CONTENT_TYPE, FrameKind
from k8e.doors.request_memory import ALWAYS, LONG_LIVED, WAITING, RequestMemory
from tests.doors.dialogue import FRAMES, House, open_house, pack_frame

ALICE, BOB, CAROL = Payer(1000, ""), Payer(1001, ""), Payer(1002, "")
MIB = 1 << 20


async def test_one_payer_and_all_together_have_their_limits_and_a_little_always_goes() -> None:
    memory = RequestMemory(48 * MIB, 64 * MIB, patience=0.02)
    alice, bob, carol = (memory.allocate(payer) for payer in (ALICE, BOB, CAROL))
    await alice.add(48 * MIB)
    with pytest.raises(Fault) as refused:
        await alice.add(1)
    assert (refused.value.code, refused.value.retry_after) == ("too_many_bytes", 1.0)
    await bob.add(16 * MIB)
    await carol.add(ALWAYS)
    with pytest.raises(Fault):
        await carol.add(1)
    for load in (alice, bob, carol):
        load.free()
    assert (memory.total, +memory._held, +memory._waiting) == (0, {}, {})


async def test_who_waits_goes_on_when_there_is_room() -> None:
    memory = RequestMemory(16 * MIB, patience=60)
    first, second = memory.allocate(ALICE), memory.allocate(ALICE)
    await first.add(16 * MIB)
    waiting = asyncio.create_task(second.add(MIB))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.free()
    await waiting
    assert second.size == MIB


async def test_a_connection_that_lasts_waits_while_it_holds_little() -> None:
    memory = RequestMemory(16 * MIB, patience=0.02)
    full, others = memory.allocate(ALICE), [memory.allocate(ALICE) for _ in range(2 * WAITING)]
    await full.add(16 * MIB)
    waiting = [asyncio.create_task(other.add(1, long_lived=True)) for other in others]
    with pytest.raises(Fault):
        await memory.allocate(ALICE).add(LONG_LIVED + 1, long_lived=True)
    assert not any(task.done() for task in waiting), "all of them wait longer than others"
    full.free()
    await asyncio.gather(*waiting)


async def test_few_wait() -> None:
    memory = RequestMemory(16 * MIB, patience=60)
    await memory.allocate(ALICE).add(16 * MIB)
    waiting = [asyncio.create_task(memory.allocate(ALICE).add(1)) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Fault):
        await memory.allocate(ALICE).add(1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not memory._waiting


async def test_what_comes_in_on_a_connection_counts_until_it_is_handed_on() -> None:
    memory = RequestMemory(16 * MIB, patience=0.02)
    buffered = BufferedBytes(memory.allocate(ALICE))
    for _ in range(100):
        assert buffered.add(MIB // 10)
    assert 8 * MIB <= memory.total <= 10 * MIB
    buffered.remove(9 * MIB)
    assert memory.total <= MIB
    assert not buffered.add(20 * MIB)
    with pytest.raises(Fault):
        await buffered.wait()
    assert memory.total <= 16 * MIB
    buffered.remove(100 * MIB)
    assert memory.total == 0
    assert buffered.add(3 * MIB)
    buffered.clear()
    assert memory.total == 0


async def test_what_goes_around_messages_is_no_message() -> None:
    memory = RequestMemory(16 * MIB)
    buffered = BufferedBytes(memory.allocate(ALICE))
    buffered.add(9 * MIB)  # of a message that is not whole yet
    for _ in range(1000):  # small calls beside it take hardly anything of that
        head, message = [("user-agent", "grpc-python/1")], 100
        buffered.add(60 + message)
        buffered.remove(estimate_head(head))
        buffered.remove(estimate_message(message))
    assert memory.total >= 8 * MIB
    buffered.clear()
    for _ in range(1000):  # a frame of HTTP/2 and one of TLS for every 16 KiB
        buffered.add(MIB + MIB // (16 << 10) * 40)
        buffered.remove(estimate_message(MIB))
    assert memory.total <= MIB


# The door

FREIGHT = 24 * MIB


class Noted(RequestMemory):
    """Knows the most that it ever held."""

    highest = 0

    def take(self, payer: Payer, size: int) -> None:
        super().take(payer, size)
        self.highest = max(self.highest, self.total)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[tuple[House, Noted]]:
    memory = Noted(FREIGHT, FREIGHT, patience=0.1)
    async with open_house(tmp_path, memory=memory) as house:
        yield house, memory
        while memory.total:  # the last connection's task may not have ended yet
            await asyncio.sleep(0.01)


async def send(path: Path, head: str, body: bytes) -> bytes:
    """A client that sends as much as it can, and reads what it is told."""
    loop, answer = asyncio.get_running_loop(), b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        await loop.sock_connect(client, str(path))
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, f"{head} HTTP/1.1\r\nHost: localhost\r\n".encode() + body)
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(client, 1 << 16):
                answer += piece
    return answer


async def take_answers(sending: list[asyncio.Task[bytes]], count: int) -> list[bytes]:
    """Of the first that are told something; the others leave then."""
    waiting = set(sending)
    while len(sending) - len(waiting) < count:
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return [task.result() for task in sending if not task.cancelled()]


async def test_bodies_that_do_not_end_fill_no_memory(small: tuple[House, Noted]) -> None:
    """Twenty clients of one user, each with a body whose last byte does not come."""
    house, memory = small
    session = await house.make_session()
    size = 8 * MIB
    body = f"Content-Type: application/octet-stream\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * (size - 1)
    head = f"PUT /v1/sessions/{session}/files?path=f"
    answers = await take_answers([asyncio.create_task(send(house.path, head, body)) for _ in range(20)], 15)
    assert 2 * size <= memory.highest <= FREIGHT
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 429 ")
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (told["code"], bool(told["retry_after"]), bool(told["hint"])) == ("too_many_bytes", True, True)


async def test_the_first_frame_of_a_run_counts_too(small: tuple[House, Noted]) -> None:
    house, _ = small
    session = await house.make_session()
    frame = pack_frame(FrameKind.REQUEST, b"x" * (30 * MIB)).data
    fields = f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(frame)}\r\n\r\n".encode()
    answer = await send(house.path, f"POST /v1/sessions/{session}/runs", fields + bytes(frame))
    assert answer.startswith(b"HTTP/1.1 429 ")


async def test_input_counts_while_it_waits_and_no_longer(small: tuple[House, Noted]) -> None:
    house, memory = small
    session = await house.make_session()
    fields: dict[str, Any] = {"code": "wc -c"}
    async with await house.dial() as client:
        await client.begin("POST", f"/v1/sessions/{session}/runs", FRAMES)
        await client.send(pack_frame(FrameKind.REQUEST, json.dumps(fields).encode()))
        for _ in range(2 * FREIGHT // MIB):
            await client.send(pack_frame(FrameKind.STDIN, b"x" * (MIB // 2)))
            assert memory.total <= FREIGHT
        await client.send(h11.EndOfMessage())
        answer = await client.read_answer()
    assert str(FREIGHT).encode() in answer.body
