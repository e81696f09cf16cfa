"""Programs in real sandboxes and the resolver, with the tests' own internet upstream."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from ipaddress import ip_address

import pytest

from k8e.engine import Runtime
from k8e.engine.local import LocalEngine
from k8e.policy import HostList
from tests.egress.internet import HOST4, HOST6, NAME_SERVER, Internet, small_internet
from tests.egress.namespaces import private_machine, run_ip
from tests.egress.zones import Zone
from tests.engine.answers import plant_answers
from tests.engine.rig import Rig, Room, find_report, place_for_engine
from tests.runtimes import do_without
from tests.sandboxes import needs_root

pytestmark = [needs_root, pytest.mark.anyio]

ZONE: Zone = {
    "both.com": {"A": ["45.90.40.1"], "AAAA": ["2a0b:4340:2::1"]},
    "half.com": {"A": ["10.0.0.1"], "AAAA": ["2a0b:4340:2::2"]},
    "inward.com": {"A": ["127.0.0.1"]},
    "long.com": {"truncate": True, "A": ["45.90.40.2"]},
    "alias.com": {"CNAME": "target.net"},
    "target.net": {"A": ["45.90.40.3"]},
    "broken.com": {"rcode": "SERVFAIL"},
}
PYTHON = """
import json, socket, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = sorted({item[4][0] for item in socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)})
    except socket.gaierror as error:
        found[name] = error.errno
print(json.dumps(found))
"""
NODE = """
const { lookup, resolve4 } = require('dns').promises;
const name = process.argv[1];
const tell = (promise) => promise.then((found) => found, (error) => error.code);
Promise.all([tell(lookup(name, { family: 4 }).then((one) => one.address)), tell(resolve4(name))])
  .then((found) => console.log(JSON.stringify(found)));
"""
NO_SUCH_NAME, NO_ADDRESS, AGAIN = -2, -5, -3


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with private_machine(), small_internet() as internet:
        internet.publish(ZONE)
        yield internet


@pytest.fixture(scope="module", params=[Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def cell(request: pytest.FixtureRequest, internet: Internet) -> AsyncIterator[tuple[LocalEngine, Room]]:
    with place_for_engine() as (state, run):
        plant_answers(state)
        engine = LocalEngine(state, run, nameservers=[ip_address(NAME_SERVER)])
        try:
            report = await find_report(engine, request.param)
            if not report.available:
                do_without(report.runtime.value, report.reason)
            rig = Rig(report.runtime, engine, report)
            name = rig.new_name()
            listed = HostList.parse(name for name in ZONE if name != "target.net")
            await engine.create(name, replace(rig.spec(), egress=listed))
            try:
                yield engine, await rig.enter(name)
            finally:
                await engine.destroy(name)
        finally:
            await engine.close()


async def test_getaddrinfo(cell: tuple[LocalEngine, Room], internet: Internet) -> None:
    engine, room = cell
    internet.clear()
    await engine.observe(room.name)
    names = [*ZONE, "evil.com", "short", "metadata.google.internal", "localhost"]
    assert json.loads(await room.output("/usr/bin/python3", "-c", PYTHON, *names)) == {
        "both.com": ["2a0b:4340:2::1", "45.90.40.1"],
        "half.com": ["2a0b:4340:2::2"],
        "inward.com": NO_ADDRESS,
        "long.com": ["45.90.40.2"],
        "alias.com": ["45.90.40.3"],
        "target.net": NO_SUCH_NAME,
        "broken.com": AGAIN,
        "evil.com": NO_SUCH_NAME,
        "short": NO_SUCH_NAME,
        "metadata.google.internal": NO_SUCH_NAME,
        "localhost": ["127.0.0.1", "::1"],
    }
    assert internet.notes().names == {name for name in ZONE if name != "target.net"}
    assert {(each.host, each.address, each.reason) for each in (await engine.observe(room.name)).refusals} == {
        ("half.com", "10.0.0.1", "address_not_public"),
        ("inward.com", "127.0.0.1", "address_not_public"),
        ("target.net", "", "name_not_listed"),
        ("evil.com", "", "name_not_listed"),
        ("short", "", "name_not_listed"),
        ("metadata.google.internal", "", "metadata"),
    }


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_node_with_both_of_its_resolvers(cell: tuple[LocalEngine, Room]) -> None:
    _, room = cell
    for name, found in (("both.com", ["45.90.40.1", ["45.90.40.1"]]), ("evil.com", ["ENOTFOUND", "ENOTFOUND"])):
        assert json.loads(await room.output("/usr/bin/node", "-e", NODE, name)) == found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(cell: tuple[LocalEngine, Room]) -> None:
    _, room = cell
    page = json.loads(await room.output("/usr/bin/curl", "-sS4", "http://alias.com/"))
    assert page["address"] == "45.90.40.3"
    refused = await room.run("/usr/bin/curl", "-sS", "http://evil.com/")
    assert refused.outcome.exit_code == 6
    assert b"Could not resolve host: evil.com" in refused.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
async def test_git(cell: tuple[LocalEngine, Room]) -> None:
    _, room = cell
    refused = await room.run("/usr/bin/git", "ls-remote", "https://evil.com/repository")
    assert refused.outcome.exit_code == 128
    assert b"Could not resolve host: evil.com" in refused.stderr


NEIGHBOUR = r"""
import socket, sys
address = sys.argv[1]
question = bytes.fromhex("000101000001000000000000") + b"\x04evil\x03com\0\0\1\0\1"
with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(2)
    client.connect((address, 53))
    client.send(question)
    try:
        print(len(client.recv(512)))
    except TimeoutError:
        print("nothing")
"""


async def test_a_neighbour_of_the_machine_cannot_ask_in_its_name(
    cell: tuple[LocalEngine, Room], internet: Internet
) -> None:
    """One that leads the addresses of wires to the machine. The sandbox may ask: it shows that there is one who
    answers, and tells of it. An account of the machine may not (tests/engine/network/test_strangers.py)."""
    engine, room = cell
    addresses = [str(address) for address in engine._network._attachment(room.name).wire.host_addresses]
    outside = ["nsenter", f"--net=/proc/{internet.process.pid}/ns/net"]
    await engine.observe(room.name)
    for address, gateway in zip(addresses, (HOST4, HOST6), strict=True):
        run_ip("route", "replace", address, "via", gateway, inside=internet.process.pid)
        assert await output(*outside, sys.executable, "-c", NEIGHBOUR, address) == "nothing"
        assert (await engine.observe(room.name)).refusals == ()
        assert (await room.python(NEIGHBOUR, address)).stdout == b"26\n"
        assert [each.host for each in (await engine.observe(room.name)).refusals] == ["evil.com"]


async def output(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    text, _ = await process.communicate()
    return text.decode().strip()
