"""Commands on a terminal, and signals: what core makes of them."""

from __future__ import annotations

import asyncio
import signal

import pytest

from k8e.core.contract import LiveRun
from k8e.core.errors import Kind
from k8e.core.model import Language, RunSpec, SessionSpec, Status, Terminal
from tests.core.rig import ALICE, BOB, Rig, fault
from tests.sandboxes import needs_root

pytestmark = needs_root


TELL_SIZES = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", flush=True)
while signal.sigwait([signal.SIGWINCH]):
    os.write(1, b"%d %d\\n" % tuple(reversed(os.get_terminal_size(0))))
"""


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create(spec=SessionSpec(env={"TERM": "from-the-session"}))


class Reader:
    """Output read bit by bit, without leaving in between."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.got = b""
        self._output = run.output()

    async def until(self, mark: bytes) -> None:
        while mark not in self.got:
            self.got += (await anext(self._output)).data
        self.got = self.got.partition(mark)[2]

    async def rest(self) -> bytes:
        async for chunk in self._output:
            self.got += chunk.data
        return self.got


async def test_a_terminal_has_its_size_and_kind_and_one_stream(rig: Rig, session: str) -> None:
    code = "stty size; echo $TERM; echo error >&2; tty >/dev/null"
    spec = RunSpec(session, code, terminal=Terminal(33, 101, "xterm-kitty"))
    result = await rig.service.runs.run(ALICE, spec)
    assert (result.stdout, result.stderr, result.exit_code) == (b"33 101\r\nxterm-kitty\r\nerror\r\n", b"", 0)
    nameless = await rig.service.runs.run(ALICE, RunSpec(session, "echo $TERM", terminal=Terminal()))
    assert nameless.stdout == b"from-the-session\r\n"
    chosen = RunSpec(session, "echo $TERM", terminal=Terminal(term="vt100"), env={"TERM": "dumb"})
    assert (await rig.service.runs.run(ALICE, chosen)).stdout == b"dumb\r\n"


async def test_it_can_be_resized_while_it_runs(rig: Rig, session: str) -> None:
    spec = RunSpec(session, TELL_SIZES, Language.PYTHON, terminal=Terminal())
    reader = Reader(await rig.service.runs.start(ALICE, spec))
    await reader.until(b"ready")
    await reader.run.resize(50, 132)
    await reader.until(b"50 132")
    await rig.service.runs.resize(ALICE, reader.run.run_id, 1, 2)
    await reader.until(b"1 2\r\n")
    await reader.run.kill()


async def test_typed_keys_are_signals(rig: Rig, session: str) -> None:
    reader = Reader(
        await rig.service.runs.start(ALICE, RunSpec(session, argv=(b"sleep", b"1000"), terminal=Terminal()))
    )
    await reader.run.write_stdin(b"\x03")
    assert await reader.rest() == b"^C"
    result = await reader.run.result()
    assert (result.exit_code, result.status) == (130, Status.KILLED)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1"])
async def test_a_signal_reaches_the_command_and_its_group(rig: Rig, session: str, name: str) -> None:
    child = f"trap 'echo child; exit' {name}; echo ready; sleep 1000 & wait"
    code = f"trap 'echo got; exit 9' {name}; sh -c \"{child}\"; :"
    reader = Reader(await rig.service.runs.start(ALICE, RunSpec(session, code)))
    await reader.until(b"ready\n")
    await reader.run.signal(signal.Signals[f"SIG{name}"])
    assert sorted((await reader.rest()).split()) == [b"child", b"got"]
    assert (await reader.run.result()).exit_code == 9


async def test_a_signal_that_is_not_handled_is_how_it_ended(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, argv=(b"sleep", b"1000")))
    await rig.service.runs.signal(ALICE, run.run_id, signal.SIGTERM)
    result = await run.result()
    assert (result.exit_code, result.status) == (143, Status.KILLED)
    await rig.service.runs.signal(ALICE, run.run_id, signal.SIGTERM)  # too late is no error
    await run.signal(signal.SIGTERM)


async def test_others_cannot_signal_or_resize(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, argv=(b"sleep", b"1000")))
    for order in (rig.service.runs.signal(BOB, run.run_id, 9), rig.service.runs.resize(BOB, run.run_id, 1, 1)):
        with fault(Kind.NOT_FOUND, "run_not_found"):
            await order
    background = await rig.start_background(session, "sleep 1000")
    with fault(Kind.CONFLICT, "run_in_background"):
        await rig.service.runs.signal(ALICE, background, 9)
    assert not run.settled.done()  # type: ignore[attr-defined]
    await run.kill()


async def test_what_is_no_signal_or_terminal_is_refused(rig: Rig, session: str) -> None:
    run = await rig.service.runs.start(ALICE, RunSpec(session, argv=(b"sleep", b"1000")))
    for number in (0, -1, 65, True):
        with fault(Kind.INVALID, "invalid_argument", "signal"):
            await run.signal(number)
    for rows, columns, field in ((-1, 80, "terminal.rows"), (24, 65536, "terminal.columns")):
        with fault(Kind.INVALID, "invalid_argument", field):
            await run.resize(rows, columns)
        with fault(Kind.INVALID, "invalid_argument", field):
            await rig.service.runs.run(ALICE, RunSpec(session, "true", terminal=Terminal(rows, columns)))
    for term in ("a b", "-x", "x\n", "x" * 65):
        with fault(Kind.INVALID, "invalid_argument", "terminal.term"):
            await rig.service.runs.run(ALICE, RunSpec(session, "true", terminal=Terminal(term=term)))
    with fault(Kind.INVALID, "invalid_argument", "terminal"):
        await rig.service.runs.run(ALICE, RunSpec(session, "true", terminal=Terminal(), background=True))
    await run.kill()
    await asyncio.wait({run.settled})  # type: ignore[attr-defined]
