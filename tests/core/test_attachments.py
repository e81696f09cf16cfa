"""Terminals that clients leave and come back to: what core makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.core.contract import LiveTerminal
from k8e.core.errors import Kind
from k8e.core.model import OUTPUT_LIMIT, SessionSpec, Status, Terminal, TerminalSpec
from k8e.core.runs.attachment import SHOWN_AGAIN
from tests.core.rig import ALICE, BOB, ManualClock, Rig, fault, open_rig
from tests.sandboxes import needs_root

pytestmark = needs_root

CAT = "stty -echo; echo ready; exec cat"
TELL_SIZES = """exec python3 -c '
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", flush=True)
while signal.sigwait([signal.SIGWINCH]):
    os.write(1, b"%d %d\\n" % tuple(reversed(os.get_terminal_size(0))))
'"""


class Client:
    """Reads bit by bit, without leaving in between."""

    def __init__(self, terminal: LiveTerminal) -> None:
        self.terminal = terminal
        self.run_id = terminal.run_id
        self.got = b""
        self._output = terminal.output()

    async def until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(20):
            while mark not in self.got:
                self.got += (await anext(self._output)).data
        before, _, self.got = self.got.partition(mark)
        return before

    async def rest(self) -> bytes:
        async with asyncio.timeout(20):
            async for chunk in self._output:
                self.got += chunk.data
        return self.got

    async def type(self, keys: bytes) -> None:
        await self.terminal.write_stdin(keys)

    async def leave(self) -> None:
        await self.terminal.kill()
        await asyncio.wait({self.terminal.left})  # type: ignore[attr-defined]


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create(spec=SessionSpec(session_id="s", env={"COLOUR": "blue"}))


async def open_terminal(rig: Rig, command: str = "", **options: object) -> Client:
    spec = TerminalSpec("s", command=command, **options)  # type: ignore[arg-type]
    return Client(await rig.service.terminals.open(ALICE, spec))


@pytest.fixture
async def cat(rig: Rig, session: str) -> AsyncIterator[Client]:
    """At a terminal that says everything twice over."""
    client = await open_terminal(rig, CAT)
    await client.until(b"ready\r\n")
    yield client
    await client.terminal.kill()


async def test_a_shell_with_the_sessions_environment_and_its_exit_code(rig: Rig, session: str) -> None:
    client = await open_terminal(rig, terminal=Terminal(33, 101, "xterm-kitty"))
    assert not client.terminal.resumed
    await client.type(b"stty -echo; PS1=; echo $0 $PWD $COLOUR $TERM; stty size; exit 7\n")
    await client.until(b"bash /workspace blue xterm-kitty\r\n33 101\r\n")
    await client.rest()
    result = await client.terminal.result()
    assert (result.exit_code, result.status, result.stdout, result.terminal) == (7, Status.COMPLETED, b"", True)
    (logged,) = await rig.service.runs.list(ALICE, "s")
    assert (logged.run_id, logged.exit_code, logged.terminal) == (client.run_id, 7, True)


async def test_a_command_of_another_user_instead(rig: Rig, session: str) -> None:
    client = await open_terminal(rig, "id -u; tty; exit 3", user="root")
    assert (await client.rest()).startswith(b"0\r\n/dev/pts/")
    assert (await client.terminal.result()).exit_code == 3


async def test_a_client_that_left_comes_back_to_what_was_last_shown(rig: Rig, cat: Client) -> None:
    await cat.type(b"before\n")
    await cat.until(b"before\r\n")
    await cat.leave()
    again = await open_terminal(rig)
    assert (again.terminal.resumed, again.run_id) == (True, cat.run_id)
    await again.until(b"ready\r\nbefore\r\n")
    await again.type(b"after\n")
    await again.until(b"after\r\n")
    await again.leave()


async def test_the_next_daemon_has_it(folder: Path) -> None:
    async with open_rig(folder) as rig:
        await rig.create(spec=SessionSpec(session_id="s"))
        client = await open_terminal(rig, CAT)
        await client.until(b"ready\r\n")
        await client.type(b"before\n")
        await client.until(b"before\r\n")
        rig.service.begin_close()
        await client.rest()
        with fault(Kind.UNAVAILABLE, "terminal_detached"):
            await client.terminal.result()
    async with open_rig(folder) as rig:
        again = await open_terminal(rig)
        assert again.run_id == client.run_id
        await again.until(b"ready\r\nbefore\r\n")
        await again.type(b"after\n\x04")
        assert b"after\r\n" in await again.rest()
        assert (await again.terminal.result()).exit_code == 0
    told = [(line["event"], line.get("caller")) for line in rig.read_audit() if line.get("run") == client.run_id]
    assert told == [("run_started", ALICE.label), ("terminal_attached", ALICE.label), ("run_ended", None)]


async def test_the_latest_client_has_it_and_the_one_before_is_told(rig: Rig, cat: Client) -> None:
    other = await open_terminal(rig, run_id=cat.run_id)
    await cat.rest()
    with fault(Kind.CONFLICT, "terminal_taken"):
        await cat.terminal.result()
    await other.type(b"mine\n")
    await other.until(b"mine\r\n")
    third = await open_terminal(rig)  # is not the one that another client is at
    assert (third.terminal.resumed, third.terminal.others) == (False, (cat.run_id,))
    await other.leave()
    await third.leave()


async def test_of_several_one_is_chosen(rig: Rig, cat: Client) -> None:
    second = await open_terminal(rig, new=True)
    await cat.leave()
    await second.leave()
    with fault(Kind.CONFLICT, "several_terminals"):
        await open_terminal(rig)
    chosen = await open_terminal(rig, run_id=cat.run_id)
    assert (await open_terminal(rig)).run_id == second.run_id  # the one that is left
    await chosen.leave()


async def test_what_is_not_there_or_not_the_callers_cannot_be_had(rig: Rig, cat: Client) -> None:
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.terminals.open(BOB, TerminalSpec("s"))
    background = await rig.start_background("s", "sleep 60")
    for run_id in ("run-0123456789abcdef", background):
        with fault(Kind.NOT_FOUND, "terminal_not_found"):
            await open_terminal(rig, run_id=run_id)
    for more in ({"new": True}, {"command": "true"}, {"user": "root"}):
        with fault(Kind.INVALID, "invalid_argument", "run_id"):
            await open_terminal(rig, run_id=cat.run_id, **more)
    with fault(Kind.INVALID, "invalid_argument", "terminal.rows"):
        await open_terminal(rig, terminal=Terminal(rows=-1))
    with fault(Kind.NOT_FOUND, "run_not_found"):
        await rig.service.runs.resize(BOB, cat.run_id, 1, 1)


async def test_resized_over_its_run_and_drawn_anew_for_the_next_client(rig: Rig, session: str) -> None:
    client = await open_terminal(rig, TELL_SIZES)
    await client.until(b"ready\r\n")
    await client.terminal.resize(50, 132)
    await client.until(b"50 132\r\n")
    await rig.service.runs.resize(ALICE, client.run_id, 51, 133)
    await client.until(b"51 133\r\n")
    await client.leave()
    again = await open_terminal(rig, terminal=Terminal(51, 133))
    await again.until(b"51 133\r\n")  # from before
    await again.until(b"51 133\r\n")  # the same size, and told all the same
    await rig.service.runs.kill(ALICE, client.run_id)


async def test_killed_at_the_clients_eyes(rig: Rig, cat: Client) -> None:
    assert await rig.service.runs.kill(ALICE, cat.run_id) is False
    await cat.rest()
    result = await cat.terminal.result()
    assert (result.status, result.exit_code) == (Status.KILLED, 143)
    await rig.wait_until_alone("s")


async def test_killed_though_its_client_reads_nothing(rig: Rig, session: str) -> None:
    client = await open_terminal(rig, "trap '' TERM; yes")
    await client.until(b"y\r\n")
    assert await rig.service.runs.kill(ALICE, client.run_id) is False
    assert (await rig.service.runs.poll(ALICE, client.run_id)).status is Status.KILLED
    with fault(Kind.LOST, "terminal_ended"):
        await client.terminal.result()
    await rig.wait_until_alone("s")


async def test_polled_with_and_without_a_client(rig: Rig, cat: Client) -> None:
    present = await rig.service.runs.poll(ALICE, cat.run_id)
    assert (present.status, present.stdout, present.stdout_bytes) == (Status.RUNNING, b"", 7)
    await cat.leave()
    absent = await rig.service.runs.poll(ALICE, cat.run_id)
    assert (absent.status, absent.stdout) == (Status.RUNNING, b"ready\r\n")
    assert (await rig.service.runs.poll(ALICE, cat.run_id, stdout_from=5)).stdout == b"\r\n"
    with fault(Kind.CONFLICT, "run_in_background"):
        await rig.service.runs.signal(ALICE, cat.run_id, 15)


async def test_its_session_expires_unless_a_client_is_there(rig: Rig, clock: ManualClock, cat: Client) -> None:
    clock.advance(7200)
    assert await rig.service.expire() == []
    await cat.leave()
    clock.advance(3599)
    assert await rig.service.expire() == []
    clock.advance(2)
    assert await rig.service.expire() == ["s"]


async def test_a_session_that_ends_or_stops_says_so(rig: Rig, cat: Client) -> None:
    await rig.service.sessions.destroy(ALICE, "s")
    await cat.rest()
    with fault(Kind.LOST, "session_ended"):
        await cat.terminal.result()
    await rig.create(spec=SessionSpec(session_id="s", persistent=True))
    client = await open_terminal(rig, CAT)
    await client.until(b"ready\r\n")
    await rig.service.sessions.stop(ALICE, "s")
    await client.rest()
    with fault(Kind.LOST, "session_stopped"):
        await client.terminal.result()
    stopped = await rig.service.runs.poll(ALICE, client.run_id)
    assert (stopped.status, stopped.reason) == (Status.KILLED, "it was stopped")


async def test_what_was_written_meanwhile_is_shown_and_what_was_dropped_is_counted(rig: Rig, session: str) -> None:
    count = OUTPUT_LIMIT // 4  # lines of eight bytes: twice what is kept
    flood = f"stty -echo; echo ready; read line; seq -w 0 {100_000 + count - 1} | tail -n {count}; echo done; exec cat"
    client = await open_terminal(rig, flood)
    await client.until(b"ready\r\n")
    await client.type(b"\n")
    await client.leave()
    while (await rig.service.runs.poll(ALICE, client.run_id)).stdout_bytes < count * 8 + 13:
        await asyncio.sleep(0.01)
    again = await open_terminal(rig)
    before = await again.until(b" bytes of output were not kept]\r\n")
    head, _, dropped = before.rpartition(b"\r\n[k8e: ")
    tail = await again.until(b"done\r\n")
    assert len(head) + int(dropped) + len(tail) + 6 == 7 + count * 8 + 6
    assert head.startswith(b"ready\r\n100000\r\n")
    await again.type(b"on it goes\n")
    await again.until(b"on it goes\r\n")
    await rig.service.runs.kill(ALICE, client.run_id)


async def test_a_long_show_leaves_its_end_for_the_next_client(rig: Rig, session: str) -> None:
    client = await open_terminal(rig, "stty -echo; seq 1 400000; echo done; exec cat")
    shown = await client.until(b"done\r\n")
    assert shown.endswith(b"\r\n399999\r\n400000\r\n")
    await client.leave()
    again = await open_terminal(rig)
    kept = await again.until(b"done\r\n")
    assert SHOWN_AGAIN - 6 <= len(kept) <= 3 * SHOWN_AGAIN
    assert shown.endswith(kept)
    await rig.service.runs.kill(ALICE, client.run_id)


async def test_what_a_terminal_would_answer_is_not_asked_again(rig: Rig, session: str) -> None:
    asked = b"\x1b[6n\x1b[c\x1b[>c\x1b[5n\x1b]11;?\x07\x1b]52;c;?\x1b\\\x1bP+q544e\x1b\\\x1b[18t\x1b[?2026$p\x05"
    kept = b"\x1b[1;31mred\x1b[0m\x1b[?1049h\x1b]0;title?\x07\x1b[2J"
    octal = "".join(f"\\{byte:03o}" for byte in asked + kept)
    client = await open_terminal(rig, f"stty -echo; printf '{octal}'; echo end; exec cat")
    assert await client.until(b"end\r\n") == asked + kept
    await client.leave()
    again = await open_terminal(rig)
    assert await again.until(b"end\r\n") == kept
    await rig.service.runs.kill(ALICE, client.run_id)
