"""Packets that a sandbox has sent: counted to know whether to ask for refusals at all."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator

import pytest

from k8e.engine.local.network.traffic import Traffic
from tests.egress.namespaces import run_ip
from tests.sandboxes import needs_root

pytestmark = needs_root


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    name = f"t{secrets.token_hex(4)}"
    ends = f"{name}a", f"{name}b"
    run_ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    try:
        run_ip("link", "set", ends[0], "alias", f"wire of {name}")
        for end in ends:
            run_ip("link", "set", end, "addrgenmode", "none", "up")
        yield ends
    finally:
        run_ip("link", "del", ends[0])


def send_over(interface: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind((interface, 0))
        sender.send(b"\xff" * 12 + b"\x88\xb5" + bytes(46))


async def test_a_packet_is_noticed_twice(pair: tuple[str, str]) -> None:
    outer, inner = pair
    traffic = Traffic(outer, f"wire of {outer[:-1]}")
    assert traffic.arrived(), "the first look cannot know"
    assert [traffic.arrived(), traffic.arrived()] == [True, False], "the kernel counts a packet before it refuses it"
    send_over(inner)
    assert [traffic.arrived(), traffic.arrived(), traffic.arrived()] == [True, True, False]
    send_over(outer)
    assert not traffic.arrived(), "what goes to the sandbox is not its own"
    traffic.forget()
    assert traffic.arrived()
    traffic.close()


async def test_an_interface_that_is_not_the_wire_tells_nothing(pair: tuple[str, str]) -> None:
    for traffic in (Traffic(pair[0], "wire of another sandbox"), Traffic("none-such", "")):
        before = len(os.listdir("/proc/self/fd"))
        assert [traffic.arrived() for _ in range(3)] == [True, True, True]
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_wire_that_goes_tells_nothing_any_more(pair: tuple[str, str]) -> None:
    outer, inner = pair
    traffic = Traffic(outer, f"wire of {outer[:-1]}")
    assert [traffic.arrived(), traffic.arrived(), traffic.arrived()] == [True, True, False]
    await asyncio.to_thread(run_ip, "link", "del", outer)
    assert traffic.arrived()
    await asyncio.to_thread(run_ip, "link", "add", outer, "type", "veth", "peer", "name", inner)
    assert traffic.arrived()
