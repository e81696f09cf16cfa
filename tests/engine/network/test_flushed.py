"""Our rules are taken away: a firewall is reloaded, a person uses nft. Nothing opens, whether there is a
daemon or not; with one the network is back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.network import Network
from k8e.policy import HostList
from tests.egress.internet import HOST4, HOST6, UPLINK, Internet
from tests.egress.namespaces import run_ip
from tests.engine.network.rig import TAG, Place, attempt, nft, open_with, routing_rules
from tests.sandboxes import needs_root

pytestmark = needs_root
ZONE: dict[str, Any] = {"one.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]}}
TABLE = ("inet", f"k8e_{TAG}")

LISTED = ("tcp", "45.90.40.7", 80)
LISTED6 = ("tcp", "2a0b:4340:40::1", 80)
OTHER = ("tcp", "45.90.41.7", 80)
HOSTS = ("45.90.40.7", "2a0b:4340:40::1")


def flush_ruleset() -> None:
    nft("flush", "ruleset")


def delete_table() -> None:
    nft("delete", "table", *TABLE)


def flush_table() -> None:
    """Its chains, sets and name stay."""
    nft("flush", "table", *TABLE)


def flush_forward() -> None:
    nft("flush", "chain", *TABLE, "forward")


def forget_wires() -> None:
    nft("flush", "set", *TABLE, "wires")


def switch_off() -> None:
    nft("add", "table", *TABLE, "{ flags dormant; }")


@contextlib.contextmanager
def machine_services() -> Iterator[Callable[[], int]]:
    """Of the machine itself, on every address; says how many have connected."""
    with contextlib.ExitStack() as stack:
        listeners = []
        for family, place in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((place, 7777))
            listener.listen()
            listener.setblocking(False)
            listeners.append(listener)

        def count() -> int:
            accepted = 0
            for each in listeners:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        each.accept()[0].close()
                        accepted += 1
            return accepted

        yield count


# Tries everything as often as it is told, and says what it reached: TCP and UDP, both families.
GREEDY = """
import socket, sys
targets = [each.rsplit(",", 1) for each in sys.argv[1:]]
for line in sys.stdin:
    for _ in range(int(line)):
        for address, port in targets:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with socket.socket(family, kind) as s:
                    s.settimeout(0.1)
                    try:
                        s.connect((address, int(port)))
                        if kind == socket.SOCK_DGRAM:
                            s.send(b"out")
                        else:
                            print(address, flush=True)
                    except OSError:
                        pass
    print("done", flush=True)
"""


@dataclass(slots=True)
class Greedy:
    """Code that waits for such a moment."""

    process: asyncio.subprocess.Process

    async def tries(self, number: int) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n".encode())
        reached = []
        while (line := (await self.process.stdout.readline()).decode().strip()) != "done":
            assert line
            reached.append(line)
        return reached


@contextlib.asynccontextmanager
async def greedy(namespace: str, *targets: tuple[str, int]) -> AsyncIterator[Greedy]:
    words = [f"{address},{port}" for address, port in targets]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "nsenter", f"--net={namespace}", sys.executable, "-c", GREEDY, *words, stdin=pipe, stdout=pipe
    )
    try:
        yield Greedy(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def try_afterwards(inside: str, wire: Wire, internet: Internet, take_away: Callable[[], None]) -> None:
    """Nothing is reached, and nothing leaves."""
    internet.clear()
    targets = [("45.90.41.7", 80), ("2a0b:4340:41::1", 80), ("169.254.169.254", 80), (HOST4, 7777), (HOST6, 7777)]
    targets += [(str(address), 7777) for address in wire.host_addresses]
    with machine_services() as connected:
        with socket.create_connection((HOST4, 7777)), socket.create_connection((HOST6, 7777)):
            assert connected() == 2, "they are there"
        async with greedy(inside, *targets) as code:
            assert await code.tries(1) == []
            take_away()
            assert await code.tries(2) == []
        assert connected() == 0
    assert internet.notes().packets == []


@pytest.mark.parametrize(
    "take_away", [flush_ruleset, delete_table, flush_table, forget_wires, switch_off], ids=lambda each: each.__name__
)
async def test_nothing_opens_while_there_is_no_daemon(
    take_away: Callable[[], None], place: Place, internet: Internet
) -> None:
    first = place.network()
    wire, inside = await open_with(first, "x", *HOSTS)
    held = os.open(inside, os.O_RDONLY)  # as the sandbox's processes do
    inside = f"/proc/{os.getpid()}/fd/{held}"
    try:
        await first.close()
        await try_afterwards(inside, wire, internet, take_away)
        again = place.network()
        await again.resume("x", "sandbox")
        assert await attempt(inside, LISTED, OTHER) == ["reached", "ConnectionRefusedError"]
        await again.remove("x")
        await again.close()
    finally:
        os.close(held)


@pytest.mark.parametrize(
    "take_away", [flush_ruleset, flush_forward, forget_wires, switch_off], ids=lambda each: each.__name__
)
async def test_the_network_is_back_without_being_asked(
    take_away: Callable[[], None], network: Network, internet: Internet
) -> None:
    """No sandbox is made and no command run meanwhile."""
    _, inside = await open_with(network, "x", *HOSTS)
    for _ in range(2):
        take_away()
        async with asyncio.timeout(30):
            while await attempt(inside, LISTED, LISTED6, OTHER) != ["reached", "reached", "ConnectionRefusedError"]:
                await asyncio.sleep(0.01)


async def test_routing_rules_that_somebody_removed_are_put_back(network: Network, internet: Internet) -> None:
    wire, inside = await open_with(network, "x", *HOSTS)
    whole = routing_rules()
    assert len([line for line in whole if f"iif {wire.interface} " in line]) == 2
    for family in ("-4", "-6"):
        run_ip(family, "rule", "del", "pref", "0", "iif", wire.interface)
    async with asyncio.timeout(30):
        while routing_rules() != whole:
            await asyncio.sleep(0.01)
    assert await attempt(inside, LISTED, OTHER) == ["reached", "ConnectionRefusedError"]


@pytest.mark.parametrize("strictness", ["1", "2"])
async def test_a_machine_that_checks_the_way_back(strictness: str, network: Network, internet: Internet) -> None:
    checks = [Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter") for name in ("all", UPLINK)]
    before = [file.read_text() for file in checks]
    for file in checks:
        file.write_text(strictness)
    try:
        _, inside = await open_with(network, "x", *HOSTS)
        assert await attempt(inside, LISTED, OTHER) == ["reached", "ConnectionRefusedError"]
    finally:
        for file, value in zip(checks, before, strict=True):
            file.write_text(value)


async def test_marks_of_others_stay_theirs(network: Network, internet: Internet) -> None:
    """A machine that routes by marks sees its own on packets of sandboxes, and nothing of ours."""
    nft("add", "table", "inet", "theirs")
    try:
        nft("add", "chain", "inet", "theirs", "early", "{ type filter hook prerouting priority -150; }")
        nft("add", "rule", "inet", "theirs", "early", "meta", "mark", "set", "0x77")
        nft("add", "chain", "inet", "theirs", "late", "{ type filter hook postrouting priority 150; }")
        nft("add", "rule", "inet", "theirs", "late", "ip", "daddr", "45.90.40.7", "meta", "mark", "!=", "0x77", "drop")
        _, inside = await open_with(network, "x", *HOSTS)
        assert await attempt(inside, LISTED, OTHER) == ["reached", "ConnectionRefusedError"]
    finally:
        nft("delete", "table", "inet", "theirs")


async def test_rules_that_somebody_flushed_are_made_again(network: Network, internet: Internet) -> None:
    _, inside = await open_with(network, "x", "45.90.40.7")
    nft("flush", "ruleset")
    _, beside = await open_with(network, "beside")
    assert await attempt(inside, ("tcp", "45.90.40.7", 80), ("tcp", "45.90.41.7", 80)) == [
        "reached",
        "ConnectionRefusedError",
    ]
    assert await attempt(beside, ("tcp", "45.90.40.7", 80)) == ["ConnectionRefusedError"]
    await network.set_hosts("x", HostList.parse([]))
    assert await attempt(inside, ("tcp", "45.90.40.7", 80)) == ["ConnectionRefusedError"]


async def test_asking_for_refusals_notices_rules_that_somebody_flushed(network: Network, internet: Internet) -> None:
    """Which is done before and after every command."""
    _, inside = await open_with(network, "x", "45.90.40.7")
    seen = []
    for action in (nft, nft):
        network.refusals("x")
        seen.append(network.flushed)
        action("flush", "ruleset")
    assert seen == [False, True]
    await network.repair()
    assert await attempt(inside, ("tcp", "45.90.40.7", 80), ("tcp", "45.90.41.7", 80)) == [
        "reached",
        "ConnectionRefusedError",
    ]
    assert [each.address for each in network.refusals("x")] == ["45.90.41.7"]
