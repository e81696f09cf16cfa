"""A client at a terminal: one at a time, who comes and goes while the command runs on.

The terminal's command is a background run. While a client is attached, the daemon reads its output and leaves the last
bytes unacknowledged: the agent still has them for the next client, whatever becomes of this one or of the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import warn
from k8e.core.model import Chunk, RunResult, Terminal
from k8e.core.sessions.live import Live
from k8e.core.store.records import RunRecord
from k8e.core.tasks import Tasks, stop, wait_done, wait_first
from k8e.link.errors import LinkError
from k8e.link.model import Process, TerminalSize

SHOWN_AGAIN: Final = 64 << 10  # bytes of output before the present that the next client sees, at least
_LAST_WORDS: Final = 1.0
# What makes a terminal type an answer: the one that was asked has answered already, or is gone.
_QUESTIONS: Final = re.compile(
    rb"\x1b\[[?>=]?[0-9;]*[cn]"  # device attributes, status, cursor position
    rb"|\x1b\[\??[0-9;]*\$p|\x1b\[>[0-9;]*q|\x1b\[(?:1[1-9]|2[01])t|\x1b\[\?u"  # modes, version, sizes, titles, keys
    rb"|\x1b\](?:[0-9]+;)+(?:[a-z0-7]*;)?\?(?:\x07|\x1b\\)"  # colours, clipboard
    rb"|\x1bP[+$]q[^\x1b]*\x1b\\"  # capabilities
    rb"|\x05"
)


@dataclass(frozen=True, slots=True)
class Scene:
    """The state in which a client finds the terminal when it attaches."""

    resumed: bool  # the terminal was there before
    replayed: int = 0  # where the output ended by then: what comes up to there was there before
    others: tuple[str, ...] = ()  # terminals of the session at which other clients are


class Attachment:
    """Implements `contract.LiveTerminal`."""

    def __init__(
        self,
        tasks: Tasks,
        live: Live,
        record: RunRecord,
        process: Process,
        scene: Scene,
        collect: Callable[[Live, RunRecord], Awaitable[RunResult]],
    ) -> None:
        self.live = live
        self.scene = scene
        self._record = record
        self._process = process
        self._collect = collect
        self._gone = live.gone
        self._failure: LinkError | None = None
        self.ending = False  # it was told to
        self._over: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()  # why the client has to leave
        self.left = tasks.spawn(self._stay())  # done when another client can attach

    @property
    def run_id(self) -> str:
        return self._record.run_id

    @property
    def session_id(self) -> str:
        return self.live.session_id

    @property
    def started(self) -> float:
        return self._record.started

    @property
    def resumed(self) -> bool:
        return self.scene.resumed

    @property
    def others(self) -> tuple[str, ...]:
        return self.scene.others

    # Output

    async def output(self) -> AsyncGenerator[Chunk, None]:
        reader = self._process.stdout
        while True:
            before = reader.position
            try:
                content = await self._read()
            except LinkError:
                return  # the result says what it means
            if not content:
                return
            first = reader.position - len(content)
            if first > before:
                yield Chunk(1, (f"\r\n[k8e: {first - before} bytes of output were not kept]\r\n".encode(),))
            yield Chunk(1, (_QUESTIONS.sub(b"", content) if first < self.scene.replayed else content,))

    async def _read(self) -> bytes:
        """The next output; b"" when there is no more of it for this client."""
        if self._over.done() or self._gone.done():
            return b""
        if self._process.stdout.queued:
            return await self._process.stdout.read()
        reading = asyncio.create_task(self._process.stdout.read())
        try:
            await wait_first(reading, self._over, self._gone)
            return reading.result() if reading.done() else b""
        finally:
            await stop(reading)

    # Input and orders; what does not reach the command any more is no error

    async def write_stdin(self, data: bytes) -> None:
        with contextlib.suppress(LinkError):
            await self._process.write(data)

    async def close_stdin(self) -> None:
        """A terminal's input has no end: the client types no more, and still sees what comes."""

    async def resize(self, rows: int, columns: int) -> None:
        checks.check_size(rows, columns)
        with contextlib.suppress(LinkError):
            await self._process.resize(TerminalSize(rows, columns))

    async def redraw(self, terminal: Terminal) -> None:
        """Has programs that fill the screen draw it anew: they do when its size changes."""
        if self.resumed:
            await self.resize(terminal.rows, max(terminal.columns - 1, 0))
        await self.resize(terminal.rows, terminal.columns)

    async def end(self, grace: float) -> None:
        """Ends the command; the client sees its last output."""
        self.ending = True
        with contextlib.suppress(LinkError):
            await self._process.end(grace)

    # The end

    async def result(self) -> RunResult:
        await wait_done(self.left)
        if self._over.done():
            raise self._over.result()
        if self._gone.done():
            error = "the session ended, and the terminal with it"
            hint = "Create a new session; what was in the old one is gone."
            gone = str(self._gone.result())
            raise Fault(Kind.LOST, "session_ended", error, detail=gone, hint=hint, run_id=self.run_id)
        if self._failure is not None:
            raise describe_detached(self, "the connection to the sandbox broke") from self._failure
        return replace(await self._collect(self.live, self._record), stdout=b"", stderr=b"")

    async def kill(self) -> None:
        """The client has left: the command goes on."""
        self.part(describe_detached(self, "the client has left"))

    def part(self, fault: Fault) -> None:
        """Sends the client away."""
        if not self._over.done():
            self._over.set_result(fault)

    async def _stay(self) -> None:
        """Holds the terminal, and the session in use, until its command ends or the client leaves."""
        ending = asyncio.create_task(self._process.wait())
        with self.live.in_use():
            await wait_first(ending, self._over, self._gone)
        try:
            if ending.done():
                ending.result()
            elif not self._gone.done():
                await self._process.detach()
        except LinkError as error:
            self._failure = error
            warn("terminal_left", run=self.run_id, cause=error)
        finally:
            await stop(ending)


class Attachments:
    """The clients that are at terminals now, by the terminal's run."""

    def __init__(self) -> None:
        self._present: dict[str, Attachment] = {}
        self._expected: set[str] = set()  # terminals that are being opened

    def add(self, attachment: Attachment) -> None:
        self._present[attachment.run_id] = attachment
        attachment.left.add_done_callback(lambda _: self._forget(attachment))

    def _forget(self, attachment: Attachment) -> None:
        if self._present.get(attachment.run_id) is attachment:
            del self._present[attachment.run_id]

    def expect(self, run_id: str) -> None:
        """A client is about to attach for the first time: until `expect_no_more`, its output is left for it."""
        self._expected.add(run_id)

    def expect_no_more(self, run_id: str) -> None:
        self._expected.discard(run_id)

    def waits_for(self, run_id: str) -> bool:
        """Whether a client has its output, or will."""
        return run_id in self._present or run_id in self._expected

    def find(self, run_id: str) -> Attachment | None:
        return self._present.get(run_id)

    def list(self, live: Live) -> list[Attachment]:
        return [each for each in self._present.values() if each.live is live]

    async def settle(self, run_id: str) -> None:
        """Has a client away whose terminal was ended, after a moment for its last output."""
        if attachment := self._present.get(run_id):
            await wait_done(attachment.left, timeout=_LAST_WORDS)
            error, hint = "the terminal was ended, and its last output was not read", f"k8e sandbox poll {run_id}"
            await self.part(run_id, Fault(Kind.LOST, "terminal_ended", error, hint=hint, run_id=run_id))

    async def part(self, run_id: str, fault: Fault) -> None:
        """Sends the client away, if there is one; returns when another can attach."""
        if attachment := self._present.get(run_id):
            attachment.part(fault)
            await wait_done(attachment.left)

    def close(self) -> None:
        for attachment in self._present.values():
            attachment.part(describe_detached(attachment, "the daemon was stopped"))


def describe_detached(attachment: Attachment, cause: str) -> Fault:
    return Fault(
        Kind.UNAVAILABLE,
        "terminal_detached",
        "you are not at the terminal any more; its command runs on",
        detail=cause,
        hint=f"Come back: k8e sandbox shell {attachment.session_id} --attach {attachment.run_id}",
        run_id=attachment.run_id,
    )
