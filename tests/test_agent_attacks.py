"""Bombs: what a command can do to the machine is the engine's to limit, what it can do to the agent is tried here.

Each one is let off under a limit of its own and must end with its command; meanwhile and afterwards others are served.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import AsyncIterator

import pytest

from devel.sandboxes import Variation
from k8e.conformance.subject import Subject, complete, equal, finish, python, read_until, run
from k8e.link.errors import AgentError, Code
from k8e.link.model import Cause, Connection, Identity, Rlimit
from tests.sandboxes import KINDS, Linked, needs_root, open_sandbox

pytestmark = needs_root
# The kernel counts processes by uid, over all sandboxes: an id that nothing else here uses.
BOMBER = Identity(uid=31_337, gid=31_337)
FEW_PROCESSES = Rlimit(resource.RLIMIT_NPROC, 100, 100)


@pytest.fixture(params=KINDS)
async def linked(request: pytest.FixtureRequest) -> AsyncIterator[Linked]:
    async with open_sandbox(request.param) as linked:
        yield linked


@pytest.fixture
async def bare() -> AsyncIterator[Linked]:
    async with open_sandbox("bare") as linked:
        yield linked


async def others_are_served(subject: Subject, times: int = 20) -> None:
    for number in range(times):
        done = await run(subject, "sh", "-c", f"echo {number}")
        equal("output", done.stdout, b"%d\n" % number)
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"content")
    equal("content", await subject.sandbox.read_file(path), b"content")


FORK_BOMB = """
import os, signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b".")
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""


async def test_fork_bomb_ends_with_its_command(bare: Linked) -> None:
    # gVisor does not apply the limit, so there the bomb would be one for the machine.
    subject = await bare.subject("bomb")
    bomb = await bare.link.start(
        python(subject, FORK_BOMB, identity=BOMBER, rlimits=(FEW_PROCESSES,), timeout=60.0, grace=0.2)
    )
    await read_until(bomb.stdout, 1)
    await others_are_served(subject)
    await bomb.end(grace=0.2)
    done = await finish(bomb)
    assert (done.outcome.signal, done.outcome.cause) == (signal.SIGKILL, Cause.ENDED)
    await bare.clean(subject)


async def test_fork_bomb_ends_by_its_timeout(bare: Linked) -> None:
    subject = await bare.subject("bomb")
    spec = python(subject, FORK_BOMB, identity=BOMBER, rlimits=(FEW_PROCESSES,), timeout=1.0, grace=0.2)
    done = await complete(subject, spec)
    assert (done.outcome.signal, done.outcome.cause) == (signal.SIGKILL, Cause.TIMEOUT)
    await bare.clean(subject)


async def test_thread_bomb_ends_with_its_command(bare: Linked) -> None:
    code = """
import threading, time
started = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()
        started += 1
except RuntimeError:
    print(started > 50, flush=True)
time.sleep(1000)
"""
    subject = await bare.subject("threads")
    bomb = await bare.link.start(python(subject, code, identity=BOMBER, rlimits=(FEW_PROCESSES,), timeout=60.0))
    assert await bomb.stdout.read() == b"True\n"
    await others_are_served(subject)
    await bomb.end(grace=0.2)
    assert (await finish(bomb)).outcome.signal == signal.SIGTERM
    await bare.clean(subject)


async def test_memory_bomb_takes_only_itself_down(linked: Linked) -> None:
    code = "keep = []\nwhile True: keep.append(bytearray(1 << 20))"
    limit = Rlimit(resource.RLIMIT_AS, 256 << 20, 256 << 20)
    subject = await linked.subject("memory")
    done = await complete(subject, python(subject, code, rlimits=(limit,), timeout=60.0))
    assert done.outcome.exit_code == 1
    assert b"MemoryError" in done.stderr
    await others_are_served(subject)


async def test_spinning_commands_leave_the_agent_responsive(linked: Linked) -> None:
    subject = await linked.subject("spin")
    spinners = [
        await linked.link.start(python(subject, "print(1, flush=True)\nwhile True: pass", timeout=100.0))
        for _ in range(10)
    ]
    for spinner in spinners:
        await spinner.stdout.read()
    await others_are_served(subject)
    for spinner in spinners:
        await spinner.end(grace=0)
    assert {(await finish(spinner)).outcome.signal for spinner in spinners} == {signal.SIGKILL}


async def test_an_agent_without_descriptors_says_so_and_recovers() -> None:
    server = """
import socket, time
server = socket.create_server(("127.0.0.1", 0), backlog=1000)
print(server.getsockname()[1], flush=True)
time.sleep(1000)
"""
    async with open_sandbox("bare", Variation(prefix=("prlimit", "--nofile=64:64"))) as linked:
        subject = await linked.subject("descriptors")
        listening = await linked.link.start(python(subject, server, timeout=200.0))
        port = int(await listening.stdout.read())
        held: list[Connection] = []
        with pytest.raises(AgentError) as caught:
            while len(held) < 100:
                held.append(await linked.link.connect(port=port))
        assert caught.value.code is Code.TOO_MANY
        assert len(held) > 10
        with pytest.raises(AgentError) as caught:
            await run(subject, "true")
        assert caught.value.code is Code.TOO_MANY
        # A lost link comes back: whoever is let in needs one more.
        await linked.dialer.drop()
        for connection in held:
            await connection.close()
        await others_are_served(subject)
        await listening.end(grace=0)
        await finish(listening)
