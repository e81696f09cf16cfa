"""The guest's bridge over vsock, with unix sockets in its place: bytes are exact, a busy connection holds no other up,
questions are answered by their number."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.engine.local.vm.control import Control
from k8e.link.dial import UnixDialer
from scripts.build_agent import LANGUAGE, PEDANTIC, SANITIZED, WARNINGS
from tests.engine.rig import eventually
from tests.sandboxes import needs_root

GUEST = Path(__file__).parents[3] / "agent" / "guest"
MOST = 8  # connections at once
ACCEPTING = "00010000"  # __SO_ACCEPTCON
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

pytestmark = needs_root


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("bridge") / "harness"
    sources = [Path(__file__).with_name("bridge_harness.c"), GUEST / "bridge.c", GUEST / "control.c"]
    flags = [*LANGUAGE, *WARNINGS, *PEDANTIC, *SANITIZED, f"-I{GUEST}"]
    subprocess.run(["cc", *flags, *map(str, sources), "-o", program], check=True)
    return program


class Bridge:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: asyncio.Queue[Streams] = asyncio.Queue()  # the ends of connections that the agent would have
        self.writers: list[asyncio.StreamWriter] = []

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.agents.put_nowait((reader, writer))

    async def connect(self, name: str = "agents") -> Streams:
        reader, writer = await asyncio.open_unix_connection(self.folder / name)
        self.writers.append(writer)
        return reader, writer

    async def pair(self) -> tuple[Streams, Streams]:
        host = await self.connect()
        return host, await asyncio.wait_for(self.agents.get(), 60)


@pytest.fixture
async def bridge(harness: Path, tmp_path: Path) -> AsyncIterator[Bridge]:
    bridge = Bridge(tmp_path)
    names = [str(tmp_path / name) for name in ("agent", "questions", "agents")]
    async with await asyncio.start_unix_server(bridge._take, names[0]):
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private"]
        process = await asyncio.create_subprocess_exec(*alone, str(harness), *names, stderr=asyncio.subprocess.PIPE)

        async def listens() -> bool:
            """It has its name a moment before it can be connected to."""
            text = await asyncio.to_thread(Path("/proc/self/net/unix").read_text)
            sockets = [line.split() for line in text.splitlines()]
            return any(words[-1] == names[2] and words[3] == ACCEPTING for words in sockets)

        try:
            await eventually(listens, "it listens")
            yield bridge
        finally:
            if process.returncode is None:
                process.kill()
            _, said = await process.communicate()
            for writer in bridge.writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in bridge.writers), return_exceptions=True)
        assert b"Sanitizer" not in said, said.decode()


async def test_bytes_are_exact_in_both_directions(bridge: Bridge) -> None:
    pairs = [await bridge.pair() for _ in range(3)]
    for (reader, writer), (agent_reader, agent_writer) in pairs:
        there, back = os.urandom(700_001), os.urandom(900_003)
        sending = asyncio.gather(*(_write(to, what) for to, what in ((writer, there), (agent_writer, back))))
        assert await agent_reader.readexactly(len(there)) == there
        assert await reader.readexactly(len(back)) == back
        await sending
    for host, agent in pairs:
        agent[1].close()
        assert await host[0].read() == b"", "when one side is gone, so is the other"


async def _write(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(content)
    await writer.drain()


async def test_a_busy_connection_holds_no_other_up(bridge: Bridge) -> None:
    busy, flood = await bridge.pair()

    async def pour() -> None:
        while True:
            await _write(flood[1], bytes(1 << 20))

    async def drink() -> None:
        while await busy[0].read(1 << 20):
            pass

    async with asyncio.timeout(60):
        work = [asyncio.create_task(each()) for each in (pour, drink)]
        for _ in range(20):
            (reader, writer), (agent_reader, agent_writer) = await bridge.pair()
            await _write(writer, b"ask")
            assert await agent_reader.readexactly(3) == b"ask"
            await _write(agent_writer, b"told")
            assert await reader.readexactly(4) == b"told"
            writer.close()
            assert await agent_reader.read() == b""
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def test_there_are_only_so_many_and_each_end_frees_its_place(bridge: Bridge) -> None:
    pairs = [await bridge.pair() for _ in range(MOST)]
    reader, _ = await bridge.connect()
    assert await reader.read() == b"", "one too many is closed"
    pairs[3][0][1].close()
    assert await pairs[3][1][0].read() == b""
    pairs[3] = await bridge.pair()


async def test_questions_are_answered_by_their_number(bridge: Bridge) -> None:
    control = Control(UnixDialer(bridge.folder / "questions"))
    await control.count_kills()
    assert "init=1 agent=2" in control.trace
    reader, writer = await bridge.connect("questions")
    for piece in (b"7 sta", b"tus\n8 status\n", b"x" * 300, b"\n9 status\n"):
        await _write(writer, piece)
    heard = [(await reader.readline()).split()[0] for _ in range(2)]
    assert heard == [b"7", b"8"]
    while (await reader.readline()).split()[0] != b"9":  # what was no question has an answer, too
        pass
    # A question that came late and the end, at once: the end is not taken for a part of it.
    await _write(writer, b"10 status\n11 halt\n")
    assert (await reader.readline()).startswith(b"10 oom_kills=")
    assert await reader.readline() == b"11 halted\n"
