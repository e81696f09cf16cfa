"""Only the sandbox is answered by its resolver: not another account of the machine, over any transport or family,
whatever address or device it claims, with our rules in force and without them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from ipaddress import ip_address
from typing import Any

from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.network import Network
from tests.engine.network.rig import Place, nft, open_with, run_inside
from tests.sandboxes import needs_root

pytestmark = needs_root
ZONE: dict[str, Any] = {"one.com": {"A": ["45.90.31.1"]}, "two.com": {"A": ["45.90.31.2"]}}
NOBODY = 65534
# Each attempt: transport, server, an address to ask from (or nothing), a device to ask on (or nothing).
ASK = """
import json, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor
def ask(transport, server, source, device, name):
    six = ":" in server
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    labels = b"".join(bytes([len(each)]) + each.encode() for each in name.split("."))
    query = struct.pack("!HHHHHH", 7, 256, 1, 0, 0, 0) + labels + bytes(1) + struct.pack("!HH", 1, 1)
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind) as s:
        s.settimeout(1)
        try:
            if device:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
            if source:
                s.setsockopt(*((socket.IPPROTO_IPV6, 78, 1) if six else (socket.IPPROTO_IP, 15, 1)))  # FREEBIND
                s.bind((source, 0))
            s.connect((server, 53))
            s.sendall(struct.pack("!H", len(query)) + query if transport == "tcp" else query)
            return "answered" if s.recv(512) else "hung up"
        except OSError as error:
            return type(error).__name__
with ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(lambda each: ask(*each), json.loads(sys.argv[1])))))
"""


async def stranger(attempts: list[tuple[str, str, str, str, str]]) -> list[str]:
    """Returns what another account of the machine gets, while the resolver is there to answer."""
    words = ["/usr/bin/python3", "-c", ASK, json.dumps(attempts)]

    def ask() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/"
        )

    done = await asyncio.to_thread(ask)
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout)
    return told


def ways(wire: Wire, name: str) -> list[tuple[str, str, str, str, str]]:
    """Plainly, from the sandbox's own address, on the wire's own device, and both."""
    return [
        (transport, str(host.ip), source, device, name)
        for transport in ("udp", "tcp")
        for host, inner in wire.pairs
        for source in ("", str(inner.ip), str(host.ip))
        for device in ("", wire.interface)
    ]


async def assert_only_the_sandbox_is_answered(network: Network, wire: Wire, inside: str) -> None:
    own = [("udp", str(address), "", "", "one.com") for address in wire.host_addresses]
    own += [("tcp", str(address), "", "", "one.com") for address in wire.host_addresses]
    told = json.loads(await run_inside(inside, sys.executable, "-c", ASK, json.dumps(own)))
    assert told == ["answered"] * 4, "the sandbox itself is"
    network.refusals("x")
    assert "answered" not in (answers := await stranger(ways(wire, "forged.com") + ways(wire, "two.com"))), answers
    assert network.refusals("x") == [], "no refusal in the sandbox's name"
    assert ip_address("45.90.31.2") not in network._attachments["x"].refusals.known, "nothing admitted"
    told = json.loads(await run_inside(inside, sys.executable, "-c", ASK, json.dumps(own)))
    assert told == ["answered"] * 4, "and nothing of its allowance is gone"


async def test_an_account_of_the_machine_is_not_answered(network: Network) -> None:
    wire, inside = await open_with(network, "x", "one.com", "two.com")
    assert len(wire.pairs) == 2, "IPv4 and IPv6"
    await assert_only_the_sandbox_is_answered(network, wire, inside)
    plainly = [(kind, str(address), "", "", "one.com") for kind in ("udp", "tcp") for address in wire.host_addresses]
    assert await stranger(plainly) == ["ConnectionRefusedError"] * 4, "and told so at once"


async def test_nor_is_it_where_the_rule_is_gone(network: Network) -> None:
    """A single rule that is taken out is not missed for a moment: the sockets hear their own wire only."""
    wire, inside = await open_with(network, "x", "one.com", "two.com")
    network._mend = lambda: None  # type: ignore[method-assign]
    nft("flush", "chain", "inet", network._machine.table.name, "input")
    await assert_only_the_sandbox_is_answered(network, wire, inside)


async def test_after_a_restart_neither(network: Network, place: Place) -> None:
    wire, inside = await open_with(network, "x", "one.com", "two.com")
    held = os.open(inside, os.O_RDONLY)
    try:
        await network.close()
        again = place.network()
        await again.resume("x", "sandbox")
        await assert_only_the_sandbox_is_answered(again, wire, f"/proc/{os.getpid()}/fd/{held}")
        await again.remove("x")
        await again.close()
    finally:
        os.close(held)
