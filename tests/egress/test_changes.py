"""A list that changes while it is in use: what is new works at once, what is gone ends at once, the rest goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from k8e.engine import EngineError
from k8e.link.model import Process
from k8e.policy import HostList
from tests.egress.rig import Cell, Site
from tests.egress.zones import Zone

pytestmark = pytest.mark.anyio

ZONE: Zone = {
    "stays.com": {"A": ["45.90.31.1"]},
    "goes.com": {"A": ["45.90.31.2"], "AAAA": ["2a0b:4340:31::2"]},
    "comes.com": {"A": ["45.90.31.3"]},
    "twin.com": {"A": ["45.90.31.2"]},  # the same address by another name
}

# Prints a line for each thing that happens to a connection: `open`, a line of what came, or how it ended.
WATCH = """
import errno, socket, sys
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connection = socket.create_connection((host, port), timeout=120)
connection.sendall(f"GET {path} HTTP/1.0\\r\\n\\r\\n".encode())
try:
    with connection.makefile("rb") as stream:
        while line := stream.readline():
            print(line.decode().strip() or "-", flush=True)
    print("ended", flush=True)
except OSError as error:
    print(errno.errorcode.get(error.errno, "SILENCE"), flush=True)
"""


class Watch:
    """A program inside that holds a connection."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._buffer = b""

    async def line(self) -> str:
        while b"\n" not in self._buffer:
            piece = await self._process.stdout.read()
            assert piece, "the program has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    async def lines(self, *ends: str) -> str:
        """Reads on to the first of these."""
        while (line := await self.line()) not in ends:
            pass
        return line


@contextlib.asynccontextmanager
async def watching(cell: Cell, host: str, port: int = 80, path: str = "/ticks") -> AsyncIterator[Watch]:
    process = await cell.room.link.start(cell.room.spec("/usr/bin/python3", "-c", WATCH, host, str(port), path))
    try:
        yield Watch(process)
    finally:
        await process.signal(9)
        process.discard()
        await process.wait()


CUT = ("ECONNRESET", "ended", "ECONNABORTED", "EPIPE", "EHOSTUNREACH", "ENETUNREACH")


@pytest.fixture
async def cell(site: Site) -> AsyncIterator[Cell]:
    async with site.cell("stays.com", "goes.com", "45.90.40.0/24") as cell:
        yield cell


@pytest.mark.parametrize("path", ["/ticks", "/silent"])
@pytest.mark.parametrize("host", ["goes.com", "2a0b:4340:31::2", "45.90.40.7"])
async def test_revoked_connections_are_cut_and_the_others_go_on(cell: Cell, host: str, path: str) -> None:
    """Also those of a program that only waits for data that never comes."""
    if ":" in host:
        assert host in (await cell.attempt(("lookup", "goes.com")))[0]
    async with watching(cell, host, path=path) as gone, watching(cell, "stays.com") as kept:
        assert await gone.lines("tick", "open")
        assert await kept.lines("tick")
        await cell.set_hosts("stays.com")
        assert await gone.lines(*CUT) in CUT
        for _ in range(20):
            assert await kept.line() == "tick"
        results = await cell.attempt(("tcp", host, 80), ("tcp", "45.90.31.2", 80), ("tcp", "goes.com", 80))
        assert results[1:] == ["!ECONNREFUSED", "!EAI_NONAME"]
        assert results[0] in ("!ECONNREFUSED", "!EAI_NONAME")
        assert await cell.reached(("tcp", "stays.com", 80)) == ["45.90.31.1"]


async def test_what_is_added_works_at_once_and_cuts_nothing(cell: Cell) -> None:
    assert await cell.attempt(("tcp", "comes.com", 80), ("tcp", "45.90.31.3", 80)) == ["!EAI_NONAME", "!ECONNREFUSED"]
    async with watching(cell, "stays.com") as kept:
        assert await kept.lines("tick")
        await cell.set_hosts("stays.com", "goes.com", "45.90.40.0/24", "comes.com", "45.90.31.4:8080")
        assert await cell.reached(("tcp", "comes.com", 80), ("tcp", "45.90.31.4", 8080)) == ["45.90.31.3", "45.90.31.4"]
        for _ in range(20):
            assert await kept.line() == "tick"


async def test_a_name_that_goes_does_not_take_its_twins_connections_along(cell: Cell) -> None:
    """Two names on one address: the connection was opened for one of them and lives while either is listed."""
    await cell.set_hosts("goes.com", "twin.com")
    assert await cell.reached(("tcp", "twin.com", 80)) == ["45.90.31.2"]
    async with watching(cell, "45.90.31.2") as kept:
        assert await kept.lines("tick")
        await cell.set_hosts("twin.com")
        assert await cell.reached(("tcp", "twin.com", 80)) == ["45.90.31.2"]


async def test_a_narrower_port(cell: Cell) -> None:
    await cell.set_hosts("stays.com", "stays.com:8080")
    async with watching(cell, "stays.com", 8080) as gone, watching(cell, "stays.com", 80) as kept:
        assert await gone.lines("tick")
        assert await kept.lines("tick")
        await cell.set_hosts("stays.com")
        assert await gone.lines(*CUT) in CUT
        for _ in range(10):
            assert await kept.line() == "tick"


async def test_clearing_the_list_ends_everything_and_it_can_come_back(cell: Cell) -> None:
    async with watching(cell, "stays.com", path="/silent") as one, watching(cell, "45.90.40.1") as two:
        assert await one.lines("open")
        assert await two.lines("tick")
        await cell.set_hosts()
        assert await one.lines(*CUT) in CUT
        assert await two.lines(*CUT) in CUT
    results = await cell.attempt(("tcp", "stays.com", 80), ("tcp", "45.90.31.1", 80), ("tcp", "45.90.40.1", 80))
    assert results == ["!EAI_NONAME", "!ECONNREFUSED", "!ECONNREFUSED"]
    await cell.set_hosts("stays.com")
    assert await cell.reached(("tcp", "stays.com", 80)) == ["45.90.31.1"]


async def test_changes_in_quick_succession(cell: Cell) -> None:
    """The list that was set last is the one in force, and each was while it lasted."""
    for turn in range(20):
        number = 50 + turn
        await cell.set_hosts("stays.com", f"45.90.{number}.0/24")
    results = await cell.reached(("tcp", "45.90.69.1", 80), ("tcp", "45.90.68.1", 80), ("tcp", "stays.com", 80))
    assert results == ["45.90.69.1", "!ECONNREFUSED", "45.90.31.1"]


async def test_the_list_of_one_sandbox_is_not_that_of_another(site: Site, cell: Cell) -> None:
    async with site.cell("goes.com") as other, watching(other, "goes.com") as kept:
        assert await kept.lines("tick")
        await cell.set_hosts()
        for _ in range(10):
            assert await kept.line() == "tick"
        assert await other.reached(("every", "goes.com", 80)) == [["2a0b:4340:31::2", "45.90.31.2"]]


async def test_a_sandbox_that_is_not_there(site: Site) -> None:
    with pytest.raises(EngineError):
        await site.engine.set_egress("nobody", HostList.parse(["stays.com"]))
