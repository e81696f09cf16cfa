"""Wires, rules, names and refusals together, in the kernel, without runtimes: programs run in a wire's namespace with
all the power of root, which no sandbox has. The other end is the small internet of tests/egress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import dns.message
import pytest

from k8e.engine import EngineError
from k8e.engine.local.network import network as network_module
from k8e.engine.local.network.addresses import Pool, Wire
from k8e.engine.local.network.admissions import change_messages
from k8e.engine.local.network.connection_limits import read_connection_limits
from k8e.engine.local.network.network import Network
from k8e.engine.local.network.refusals import MORE
from k8e.engine.local.network.rules import KEPT_REFUSALS, MAX_ADDRESSES, wire_sets
from k8e.engine.local.network.table import Table
from k8e.engine.local.network.wires import open_wire
from k8e.policy import HostList
from tests.egress.internet import Internet
from tests.egress.namespaces import run_ip
from tests.engine.network.rig import TAG, Place, attempt, nft, open_with, run_inside
from tests.sandboxes import needs_root

pytestmark = needs_root
ZONE: dict[str, Any] = {"one.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:31::1"]}, "two.com": {"A": ["45.90.31.2"]}}


async def test_what_is_listed_is_reached_and_nothing_else(network: Network, internet: Internet) -> None:
    _, inside = await open_with(network, "x", "45.90.40.0/24", "[2a0b:4340:40::1]:8080")
    internet.clear()
    told = await attempt(
        inside,
        ("tcp", "45.90.40.7", 80),
        ("tcp", "2a0b:4340:40::1", 8080),
        ("tcp", "45.90.40.7", 22),
        ("tcp", "2a0b:4340:40::1", 80),
        ("tcp", "45.90.41.7", 80),
        ("udp", "45.90.40.7", 443),
    )
    assert told == ["reached", "reached", *["ConnectionRefusedError"] * 4]
    assert set(internet.notes().connections) == {("45.90.40.7", 80), ("2a0b:4340:40::1", 8080)}
    refused = {(each.address, each.port, each.reason) for each in network.refusals("x")}
    assert refused == {
        ("45.90.40.7", 22, "port_not_listed"),
        ("2a0b:4340:40::1", 80, "port_not_listed"),
        ("45.90.41.7", 80, "address_not_listed"),
        ("45.90.40.7", 443, "protocol_not_allowed"),
    }
    assert network.refusals("x") == [], "each is told once"


async def test_rules_are_in_force_before_the_interface_is_there(network: Network) -> None:
    seen: list[tuple[int, int, bool]] = []

    def look_first(wire: Wire, sandbox: str) -> int:
        table = Table(f"k8e_{TAG}")
        there = wire.interface in table.wires()
        blocks, live = table.elements(f"blocks4_{wire.index}"), table.elements("live")
        table.close()
        seen.append((len(blocks), len(live), there))
        assert not os.path.exists(f"/proc/sys/net/ipv4/conf/{wire.interface}")
        return open_wire(wire, sandbox)

    await network.open("x", HostList.parse(["45.90.40.7:80"]), "sandbox", lay=look_first)
    assert seen == [(1, 1, True)]


async def test_both_ends_know_each_other_without_asking(network: Network) -> None:
    """A reset in another host's name has no address to ask from: it must not depend on what was asked before."""
    wire, inside = await open_with(network, "x")
    outside = json.loads(run_json("ip", "-j", "neigh", "show", "dev", wire.interface))
    assert {(each["dst"], each["lladdr"], *each["state"]) for each in outside} == {
        (str(address), wire.inner_mac, "PERMANENT") for address in wire.inner_addresses
    }
    within = json.loads(await run_inside(inside, "ip", "-j", "neigh"))
    assert {(each["dst"], each["lladdr"], *each["state"]) for each in within} == {
        (str(address), wire.host_mac, "PERMANENT") for address in wire.host_addresses
    }
    assert await attempt(inside, ("tcp", "2a0b:4340:40::1", 80)) == ["ConnectionRefusedError"]


def run_json(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


SPOOF = """
import socket, struct, sys
source, target = sys.argv[1], sys.argv[2]
def total(data):
    value = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while value >> 16:
        value = (value & 0xFFFF) + (value >> 16)
    return ~value & 0xFFFF
addresses = socket.inet_aton(source) + socket.inet_aton(target)
tcp = struct.pack("!HHIIBBHHH", 4444, 80, 1, 0, 80, 2, 1000, 0, 0)
tcp = tcp[:16] + struct.pack("!H", total(addresses + struct.pack("!HH", 6, len(tcp)) + tcp)) + tcp[18:]
header = struct.pack("!BBHHHBBH", 69, 0, 40, 0, 0, 64, 6, 0) + addresses
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sender:
    sender.sendto(header + tcp, (target, 0))
"""


async def test_nobody_speaks_with_anothers_address(network: Network, internet: Internet) -> None:
    """Even who has the power to write packets by hand. The right address works, so the packets are right."""
    one, inside = await open_with(network, "one", "45.90.40.7")
    other, _ = await open_with(network, "other", "45.90.41.7")
    internet.clear()
    for source in (str(other.inner4), str(one.host4), "192.0.2.9", "45.90.28.2", "127.0.0.1"):
        for target in ("45.90.40.7", "45.90.41.7"):
            await run_inside(inside, sys.executable, "-c", SPOOF, source, target)
    assert internet.notes().packets == []
    await run_inside(inside, sys.executable, "-c", SPOOF, str(one.inner4), "45.90.40.7")
    assert ("tcp", "45.90.40.7", 80) in internet.notes().packets


FLOOD = """
import socket
for number in range(10_000):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", (f"45.90.{number >> 8}.{number & 255}", 1000 + number))
"""


async def test_a_flood_of_refusals_stays_bounded_and_says_that_there_were_more(network: Network) -> None:
    _, inside = await open_with(network, "x")
    _, beside = await open_with(network, "beside")
    await run_inside(inside, sys.executable, "-c", FLOOD)
    await attempt(beside, ("tcp", "45.90.40.7", 80))
    told = network.refusals("x")
    assert len(told) == KEPT_REFUSALS + 1
    assert told[-1].reason == MORE
    assert len({(each.address, each.port) for each in told[:-1]}) == KEPT_REFUSALS
    assert [each.address for each in network.refusals("beside")] == ["45.90.40.7"], "one's flood is not another's"
    assert network.refusals("x") == []
    await attempt(inside, ("tcp", "45.90.40.7", 80))
    assert [each.address for each in network.refusals("x")] == ["45.90.40.7"], "there is room again"


QUESTIONS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for number in range(int(sys.argv[1])):
        sender.sendto(b"x", (f"45.{number >> 16}.{number >> 8 & 255}.{number & 255}", 53))
"""


def count_connections() -> int:
    return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())


async def test_questions_do_not_fill_the_machines_memory_of_connections(network: Network) -> None:
    """Each address that is asked is another connection, for half a minute, and they all lead to the resolver."""
    asking, inside = await open_with(network, "x", "one.com")
    wire, beside = await open_with(network, "beside", "one.com")
    before, most = count_connections(), read_connection_limits().queries(asking.index)
    await run_inside(inside, sys.executable, "-c", QUESTIONS, str(most + 3000))
    assert most * 0.9 < count_connections() - before <= most + 100
    assert await resolve(beside, wire, "one.com") == ["45.90.31.1"]


DIRECT = """
import socket, sys
question = bytes.fromhex(sys.argv[2])
for number in range(int(sys.argv[3])):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(20)
        sender.sendto(question, (sys.argv[1], 53))
        assert sender.recv(512)
"""


async def test_questions_to_the_resolver_itself_take_no_room_there(network: Network) -> None:
    """As resolv.conf has them sent: more of them than a late sandbox has entries, each from a new port."""
    wire, inside = await open_with(network, "x", "one.com")
    before, many = count_connections(), 400
    question = dns.message.make_query("one.com", "A").to_wire().hex()
    await run_inside(inside, sys.executable, "-c", DIRECT, str(wire.host4), question, str(many))
    assert count_connections() - before < many // 2


@pytest.mark.parametrize("ask", ["udp", "tcp"])
@pytest.mark.parametrize("resolver", ["45.90.40.7", "2a0f:1::53"])
async def test_another_resolver_seems_to_answer(network: Network, ask: str, resolver: str) -> None:
    """A program that asks it hears from it, also one that takes answers from no other address."""
    code = f"""
import dns.message, dns.query, sys
answer = dns.query.{ask}(dns.message.make_query("one.com", "A"), sys.argv[1], timeout=20, ignore_unexpected=True) \
    if {ask == "udp"} else dns.query.tcp(dns.message.make_query("one.com", "A"), sys.argv[1], timeout=20)
print(*(record for each in answer.answer for record in each))
"""
    _, inside = await open_with(network, "x", "one.com")
    assert (await run_inside(inside, sys.executable, "-c", code, resolver)).split() == ["45.90.31.1"]


async def test_what_a_wildcard_admits_without_end_is_bounded_in_time_and_number(network: Network) -> None:
    """A name server that has sixteen new addresses for every name, remembered upstream or not. The list can be changed
    meanwhile."""
    await open_with(network, "x", "*.wild.com")
    entry = HostList.parse(["*.wild.com"]).entries[0]

    async def admit(number: int) -> None:
        addresses = [ip_address(f"45.{number >> 8}.{number & 255}.{each}") for each in range(16)]
        await network._admit("x", entry, f"n{number}.wild.com", addresses, 3600.0)

    began = time.monotonic()
    many = int(network_module.ADMISSIONS_AT_ONCE) + 60
    flood = [asyncio.create_task(admit(number)) for number in range(many)]
    await asyncio.sleep(0)
    await network.set_hosts("x", HostList.parse(["*.wild.com", "45.90.40.7"]))
    assert not all(each.done() for each in flood), "no change of a list waits for all of them"
    await asyncio.gather(*flood)
    assert time.monotonic() - began >= 55 / network_module.ADMISSIONS
    assert len(network._attachments["x"].admissions.openings) == MAX_ADDRESSES
    assert len(network._machine.table.elements(f"names4_{network._attachments['x'].wire.index}")) == MAX_ADDRESSES


async def test_names_that_flood_stay_bounded(network: Network) -> None:
    await open_with(network, "x")
    for number in range(10_000):
        network._refuse_name("x", f"name{number}.com", "name_not_listed", "")
    told = network.refusals("x")
    assert len(told) < 300
    assert told[-1].reason == MORE


def snapshot(table: Table, wires: list[Wire]) -> dict[str, set[tuple[bytes, bytes, bytes]]]:
    return {
        name: {(each.key, each.end, each.data) for each in table.elements(name)}
        for wire in wires
        for name in wire_sets(wire)
    }


async def test_among_many_wires_a_change_of_one_touches_no_other(network: Network) -> None:
    """Forty, in three blocks; latency with hundreds is bench's."""
    wires = [(await open_with(network, f"x{number}", "45.90.40.7", "one.com"))[0] for number in range(40)]
    table = Table(f"k8e_{TAG}")
    others = [wire for wire in wires if wire != wires[17]]
    before, live = snapshot(table, others), {each.key for each in table.elements("live")}
    assert len(live) == 80 - 40, "a name has no mark until it leads somewhere"
    await network.set_hosts("x17", HostList.parse(["45.90.0.0/16:443", "2a0b:4340::/32"]))
    assert snapshot(table, others) == before
    assert len(live & {each.key for each in table.elements("live")}) == 39
    await network.remove("x17")
    assert snapshot(table, others) == before
    table.close()


@contextlib.asynccontextmanager
async def connected(namespace: str, address: str, path: str = "/ticks") -> AsyncIterator[asyncio.StreamReader]:
    """A program that holds a connection and repeats what comes, then how it ended."""
    code = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 80), timeout=60)
connection.sendall(f"GET {sys.argv[2]} HTTP/1.0\\r\\n\\r\\n".encode())
try:
    for line in connection.makefile("rb"):
        print(line.decode().strip(), flush=True)
    print("ended", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
    process = await asyncio.create_subprocess_exec(
        "nsenter", f"--net={namespace}", sys.executable, "-c", code, address, path, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_until(stream: asyncio.StreamReader, *wanted: str) -> str:
    while (line := (await stream.readline()).decode().strip()) not in wanted:
        assert line is not None
        assert not stream.at_eof()
    return line


async def resolve(namespace: str, wire: Wire, name: str, kind: str = "A") -> list[str]:
    code = """
import dns.message, dns.query, sys
answer = dns.query.udp(dns.message.make_query(sys.argv[2], sys.argv[3]), sys.argv[1], timeout=20)
print(*(record for each in answer.answer for record in each), sep="\\n")
"""
    return (await run_inside(namespace, sys.executable, "-c", code, str(wire.host4), name, kind)).split()


@pytest.mark.parametrize("path", ["/ticks", "/silent"])
async def test_a_connection_outlives_its_address_and_ends_with_its_entry(
    network: Network, internet: Internet, path: str
) -> None:
    wire, inside = await open_with(network, "x", "one.com", "two.com")
    assert await resolve(inside, wire, "one.com") == ["45.90.31.1"]
    async with connected(inside, "45.90.31.1", path) as stream:
        await read_until(stream, "tick", "open")
        nft("flush", "map", "inet", f"k8e_{TAG}", f"names4_{wire.index}")  # as if its time had come
        assert await attempt(inside, ("tcp", "45.90.31.1", 80)) == ["ConnectionRefusedError"]
        if path == "/ticks":
            for _ in range(5):
                assert (await stream.readline()).decode().strip() == "tick"
        await network.set_hosts("x", HostList.parse(["two.com"]))
        assert await read_until(stream, "ended", "ConnectionResetError") == "ConnectionResetError"


async def test_a_daemon_that_starts_again_goes_on_where_the_other_was(place: Place, internet: Internet) -> None:
    first = place.network()
    wire, inside = await open_with(first, "x", "one.com", "two.com", "45.90.40.7")
    held = os.open(inside, os.O_RDONLY)  # as the sandbox's processes do
    inside = f"/proc/{os.getpid()}/fd/{held}"
    try:
        assert await resolve(inside, wire, "one.com") == ["45.90.31.1"]
        async with connected(inside, "45.90.31.1") as kept, connected(inside, "45.90.40.7") as cut:
            for stream in (kept, cut):
                await read_until(stream, "tick")
            await first.close()
            # While no daemon is there: what was open stays open, nothing new opens, names are not answered.
            assert await attempt(inside, ("tcp", "45.90.31.1", 80), ("tcp", "45.90.31.2", 80)) == [
                "reached",
                "ConnectionRefusedError",
            ]
            second = place.network()
            await second.resume("x", "sandbox")
            assert await resolve(inside, wire, "two.com") == ["45.90.31.2"]
            told = await attempt(
                inside, ("tcp", "45.90.31.1", 80), ("tcp", "45.90.31.2", 80), ("tcp", "45.90.40.7", 80)
            )
            assert told == ["reached"] * 3
            await read_until(kept, "tick")
            await second.set_hosts("x", HostList.parse(["one.com"]))
            assert await read_until(cut, "ended", "ConnectionResetError") == "ConnectionResetError"
            assert (await kept.readline()).decode().strip() == "tick"
            assert ("45.90.31.2", 80) in {(each.address, each.port) for each in second.refusals("x")}, "noted meanwhile"
            await second.remove("x")
            await second.close()
    finally:
        os.close(held)


async def test_what_the_record_does_not_explain_is_closed(place: Place, internet: Internet) -> None:
    """A daemon was killed between the kernel and the disk, or another program wrote into our table."""
    first = place.network()
    wire, inside = await open_with(first, "x", "one.com")
    held = os.open(inside, os.O_RDONLY)
    inside = f"/proc/{os.getpid()}/fd/{held}"
    try:
        await first.close()
        mark = wire.mark(77)
        nft("add", "element", "inet", f"k8e_{TAG}", "live", f"{{ {mark} }}")
        element = f"{{ 45.90.50.1 . 80 timeout 1h : {mark} }}"
        nft("add", "element", "inet", f"k8e_{TAG}", f"names4_{wire.index}", element)
        assert await attempt(inside, ("tcp", "45.90.50.1", 80)) == ["reached"]
        second = place.network()
        await second.resume("x", "sandbox")
        assert await attempt(inside, ("tcp", "45.90.50.1", 80)) == ["ConnectionRefusedError"]
        await second.remove("x")
        await second.close()
    finally:
        os.close(held)


async def test_a_list_that_the_kernel_refuses_leaves_the_old_one_in_force(
    network: Network, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, inside = await open_with(network, "x", "45.90.40.7")
    record = (place.folder / "x.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(network_module, "change_messages", lambda _table, *rest: change_messages("k8e_elsewhere", *rest))
        with pytest.raises(EngineError) as raised:
            await network.set_hosts("x", HostList.parse(["45.90.41.7"]))
    assert raised.value.control == "network rules"
    assert (place.folder / "x.json").read_text() == record
    assert await attempt(inside, ("tcp", "45.90.40.7", 80), ("tcp", "45.90.41.7", 80)) == [
        "reached",
        "ConnectionRefusedError",
    ]
    await network.set_hosts("x", HostList.parse(["45.90.41.7"]))
    assert await attempt(inside, ("tcp", "45.90.41.7", 80)) == ["reached"]
    assert wire.index == 0


async def test_an_address_in_the_pools_way_is_passed_over(network: Network) -> None:
    pool = Pool()
    taken = pool.block_networks(0)[0]
    run_ip("route", "add", "unreachable", str(taken))
    try:
        wire, _ = await open_with(network, "x")
        assert wire.host4 not in taken
    finally:
        run_ip("route", "del", "unreachable", str(taken))


async def test_the_machine_forwards_while_there_are_wires_and_not_after(place: Place) -> None:
    settings = [Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding")]
    for file in settings:
        file.write_text("0")  # a new namespace may have what the machine has
    network = place.network()
    await open_with(network, "x")
    assert [file.read_text() for file in settings] == ["1\n", "1\n"]
    await network.close()
    assert [file.read_text() for file in settings] == ["1\n", "1\n"], "a sandbox lives on"
    last = place.network()
    await last.remove("x")
    await last.close()
    assert [file.read_text() for file in settings] == ["0\n", "0\n"]
