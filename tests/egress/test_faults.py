"""Without an engine, a resolver or a daemon, rules stay and nothing opens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.egress.internet import Internet
from tests.egress.rig import Cell, Site
from tests.egress.zones import Zone

pytestmark = pytest.mark.anyio

ZONE: Zone = {
    "allowed.com": {"A": ["45.90.31.1"]},
    "also.com": {"A": ["45.90.31.2"]},
    "evil.com": {"A": ["45.90.66.6"]},
}

# Goes through the same attempts again and again and writes down what came of them, a line of JSON for each round.
ROUNDS = """
import errno, json, os, socket
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # no use in waiting for a resolver that is gone
held = socket.create_connection(("allowed.com", 80), timeout=60)
held.sendall(b"GET /ticks HTTP/1.0\\r\\n\\r\\n")
ticks = held.makefile("rb")
def connect(host, port=80):
    try:
        socket.create_connection((host, port), timeout=20).close()
        return "reached"
    except socket.gaierror as error:
        return "no name"
    except OSError as error:
        return errno.errorcode.get(error.errno, "SILENCE")
with open("/workspace/rounds", "w", buffering=1) as file:
    while True:
        file.write(json.dumps({
            "held": ticks.readline().decode(),
            "known address": connect("45.90.31.1"),
            "unknown address": connect("45.90.66.6"),
            "address of an allowed name never asked for": connect("45.90.31.2"),
            "metadata": connect("169.254.169.254"),
            "other port": connect("45.90.31.1", 8080),
            "allowed name": connect("allowed.com"),
            "other name": connect("evil.com"),
        }) + "\\n")
"""
SHUT = {"unknown address", "address of an allowed name never asked for", "metadata", "other port"}


class Rounds:
    """Read from the sandbox's disk, since there is no other way in meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async def wait(self, key: str, value: str, more: int = 3) -> list[dict[str, Any]]:
        """That many new ones, and one with this result."""
        before = len(self.read())
        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(0.02)
                new = self.read()[before:]
                if len(new) >= more and any(each[key] == value for each in new):
                    return new


@pytest.fixture
def wire(internet: Internet) -> Internet:
    internet.clear()
    return internet


async def test_without_an_engine_the_rules_stay_and_nothing_opens(site: Site, wire: Internet) -> None:
    async with site.cell("allowed.com", "also.com") as cell:
        await cell.room.link.start(cell.room.spec("/usr/bin/python3", "-c", ROUNDS))
        rounds = Rounds(cell.room.paths.workspace / "rounds")
        await rounds.wait("allowed name", "reached")
        await site.engine.close()
        alone = await rounds.wait("allowed name", "no name", more=2)
        assert {each["known address"] for each in alone} == {"reached"}

        site.engine = site.make_engine()
        again = await site.enter(cell.room.name)
        await rounds.wait("allowed name", "reached")
        everything = rounds.read()
        for key in SHUT:
            assert {each[key] for each in everything} == {"ECONNREFUSED"}, key
        assert {each["other name"] for each in everything} == {"no name"}
        assert {each["held"] for each in everything} <= {"HTTP/1.0 200 OK\r\n", "\r\n", "tick\n"}
        await again.set_hosts("also.com")
        assert await again.reached(("tcp", "also.com", 80), ("tcp", "45.90.31.1", 80)) == [
            "45.90.31.2",
            "!ECONNREFUSED",
        ]
    notes = wire.notes()
    assert notes.names == {"allowed.com", "also.com"}
    assert {address for _, address in map(_place, notes.packets)} <= {"45.90.31.1", "45.90.31.2", "45.90.29.53"}


def _place(packet: tuple[str, str, int]) -> tuple[str, str]:
    return packet[0], packet[1]


async def test_a_new_engine_finds_the_list_and_revokes_what_the_old_one_opened(site: Site) -> None:
    """Which it did not see being opened: the kernel knows for which reason it was."""
    async with site.cell("allowed.com", "also.com") as cell:
        code = """
import socket
held = socket.create_connection(("also.com", 80), timeout=120)
held.sendall(b"GET /silent HTTP/1.0\\r\\n\\r\\n")
print(held.recv(1000), flush=True)
try:
    print("came", held.recv(1000), flush=True)
except OSError as error:
    print("cut", flush=True)
open("/workspace/cut", "w").close()
"""
        process = await cell.room.link.start(cell.room.spec("/usr/bin/python3", "-c", code))
        assert b"200 OK" in await process.stdout.read()
        await site.engine.close()
        site.engine = site.make_engine()
        again: Cell = await site.enter(cell.room.name)
        assert await again.reached(("tcp", "allowed.com", 80)) == ["45.90.31.1"]
        marker = cell.room.paths.workspace / "cut"
        assert not marker.exists()
        await again.set_hosts("allowed.com")
        async with asyncio.timeout(60):
            while not marker.exists():
                await asyncio.sleep(0.02)
