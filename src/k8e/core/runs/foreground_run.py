"""A foreground run: its output, its input, orders to it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from k8e.core import checks
from k8e.core.egress.denials import Mark
from k8e.core.model import Chunk, RunResult
from k8e.core.runs.endings import ALLOWANCE, GRACE, LOOK, Endings, wait_until
from k8e.core.sandbox.output import HeadTail
from k8e.core.sessions.live import Gone, Live
from k8e.core.store.records import RunRecord
from k8e.core.tasks import Tasks, stop, wait_done, wait_first, wait_result
from k8e.link.errors import LinkError
from k8e.link.model import ByteReader, Outcome, Process, Scope, TerminalSize

TIDY: Final = 10.0  # seconds for the end of a sandbox that a result waits for


@contextlib.contextmanager
def _ended_with(limit: asyncio.Timeout, gone: asyncio.Future[Any]) -> Iterator[None]:
    """The time is over as soon as the sandbox is gone."""

    def end(_: asyncio.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # it is over already
            limit.reschedule(0)

    gone.add_done_callback(end)
    try:
        yield
    finally:
        gone.remove_done_callback(end)


class News:
    """Wakes the one who waits for any of several things, and looks then which it is."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def tell(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Overdue(Exception):
    """The sandbox did not say in time how a command ended."""


class ForegroundRun:
    """Implements `contract.LiveRun`. Its end is waited for and recorded, also when the caller does not ask for it."""

    def __init__(
        self,
        endings: Endings,
        tasks: Tasks,
        live: Live,
        record: RunRecord,
        mark: Mark,
        process: Process,
        due: float,
        settled: asyncio.Task[RunResult] | None = None,
    ) -> None:
        """`due`: when the caller has to have its answer, in the loop's time. `settled`: the task that calls `collect`,
        where it is there already."""
        self.record = record
        self.live = live
        self._gone = live.gone  # this life's: a session that is started again has another one
        self._endings = endings
        self._tasks = tasks
        self._process = process
        self._mark = mark
        self._due = due
        self._collecting = settled is not None
        self._broken = False
        self._left: Callable[[], asyncio.Future[None] | None] = lambda: None
        live.begin_use()
        self.settled = settled or tasks.spawn(self._settle(), watched=True)

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def session_id(self) -> str:
        return self.live.session_id

    @property
    def command(self) -> int:
        return self._process.id

    # Output

    async def output(self) -> AsyncGenerator[Chunk, None]:
        """Each chunk is all that a stream has when the caller asks for the next. No task reads ahead: the link does."""
        ended = False
        news = News()
        readers = {1: self._process.stdout, 2: self._process.stderr}
        for reader in readers.values():
            reader.listen(news.tell)
        ends = (self._gone, self.settled)
        for end in ends:
            end.add_done_callback(news.tell)
        try:
            while readers:
                if (stream := next((number for number, reader in readers.items() if reader.ready), None)) is not None:
                    pieces = await self._read(readers[stream])
                    if pieces:
                        # Behind the other one: a stream that never pauses does not keep the other from being read.
                        readers[stream] = readers.pop(stream)
                        yield Chunk(stream, pieces)
                    else:
                        del readers[stream]
                elif self._lost:
                    break
                else:
                    await news.wait()
            ended = True
        finally:
            for reader in (self._process.stdout, self._process.stderr):
                reader.listen(None)
            for end in ends:
                end.remove_done_callback(news.tell)
            if not ended:
                self.leave()

    @property
    def _lost(self) -> bool:
        return self._broken or self._gone.done()

    async def _read(self, reader: ByteReader) -> tuple[bytes, ...]:
        try:
            return await reader.read_all()
        except LinkError:
            self._broken = True  # the result says what it means
            return ()

    async def collect(self, stdin: bytes) -> RunResult:
        """All of it: both streams within bounds, and the result. Called once, by the task that is `settled`."""
        stdout, stderr = HeadTail(), HeadTail()
        self._process.stdout.divert(stdout.feed)
        self._process.stderr.divert(stderr.feed)
        feeder = asyncio.create_task(self.feed(stdin)) if stdin else None
        try:
            result = await self._settle()
        finally:
            if feeder is not None:
                feeder.cancel()
        content, errors = stdout.take(), stderr.take()
        # Also says what a broken connection cost.
        truncated = result.stdout_bytes > len(content) or result.stderr_bytes > len(errors)
        if not content and not errors and truncated == result.truncated:
            return result
        return replace(result, stdout=content, stderr=errors, truncated=truncated)

    # Input

    async def feed(self, stdin: bytes) -> None:
        await self.write_stdin(stdin)
        await self.close_stdin()

    async def write_stdin(self, data: bytes) -> None:
        # A command need not read all that it is given; if the link is lost, the result says so.
        with contextlib.suppress(LinkError):
            if data:
                await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    # Orders. One that does not reach the command any more is no error: the result says how the command ended.

    async def signal(self, number: int) -> None:
        checks.check_signal(number)
        with contextlib.suppress(LinkError):
            await self._process.signal(number, Scope.GROUP)

    async def resize(self, rows: int, columns: int) -> None:
        checks.check_size(rows, columns)
        with contextlib.suppress(LinkError):
            await self._process.resize(TerminalSize(rows, columns))

    # The end

    async def result(self) -> RunResult:
        try:
            result = await wait_result(self.settled)
        except asyncio.CancelledError:
            self.leave()
            raise
        finally:
            after = self._left()
        if after is not None:
            await wait_done(after, timeout=TIDY)
        return result

    async def kill(self) -> None:
        self.leave()
        self._left()

    def when_left(self, callback: Callable[[], asyncio.Future[None] | None]) -> None:
        """Calls back when there is a result, or the caller leaves without it. What it returns is waited for before the
        caller has the result, but not for ever."""
        self._left = callback

    def leave(self) -> None:
        """The caller is gone: ends the tree and drops the rest of the output."""
        if not self.settled.done():
            self._process.discard()
            self._tasks.spawn(self.end())

    async def end(self) -> None:
        """Ends the tree; a reader goes on to the end of the output."""
        with contextlib.suppress(LinkError):  # then there is no more to end, and the result says so
            await self._process.end(GRACE)

    async def _settle(self) -> RunResult:
        try:
            try:
                outcome = await self._wait()
            except Overdue:
                self._broken = True
                return self._endings.time_out(self.live, self._count(), began=True)
            except (LinkError, Gone) as error:
                self._broken = True
                return await self._endings.conclude(self.live, self._count(), error)
            return await self._endings.finish(self.live, self.record, self._mark, outcome)
        finally:
            self.live.end_use()

    async def _wait(self) -> Outcome:
        if self._process.ended:  # as a short command has, whose start and end come together
            return await self._process.wait()
        limit = asyncio.timeout_at(self._due)
        try:
            async with limit:
                with _ended_with(limit, self._gone):
                    return await self._process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
        return await self._wait_longer()

    async def _wait_longer(self) -> Outcome:
        """After `due`, or the end of the sandbox: what has arrived is read, and a slow reader is waited for."""
        waiting = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {waiting, self._gone}
        await wait_until(either, self._due)
        if not self._collecting:
            await self._wait_for_reader(either)
        if not waiting.done() and not self._gone.done():
            self._tasks.spawn(self._clear_away(waiting))
            raise Overdue
        if waiting.done():
            return waiting.result()
        await stop(waiting)
        raise self._gone.result()

    async def _wait_for_reader(self, either: set[asyncio.Future[Any]]) -> None:
        """Waits while the caller's own reader is slow, because the result comes behind the output. Output that the
        sandbox goes on to send is not waited for."""
        slow = False
        streams = (self._process.stdout, self._process.stderr)
        for _ in range(2):  # read up to the first marks, there is room for all that an ended command had left
            marks = [stream.position + stream.queued for stream in streams]
            looks = 0
            while not any(future.done() for future in either) and any(
                stream.queued and stream.position < mark for stream, mark in zip(streams, marks, strict=True)
            ):
                await wait_first(*either, timeout=LOOK)
                looks += 1
            slow = slow or looks > 1
        if slow:
            await wait_first(*either, timeout=ALLOWANCE)

    async def _clear_away(self, waiting: asyncio.Task[Outcome]) -> None:
        """No caller waits for the command any more; it is ended when its sandbox answers again."""
        with contextlib.suppress(LinkError):
            await self._process.end(0)
            self._process.discard()
            await wait_first(waiting, self._gone)
        await stop(waiting)
        self._endings.forget(self.record)

    def _count(self) -> RunRecord:
        """The record with what is known of the output."""
        stdout, stderr = self._process.stdout, self._process.stderr
        return replace(
            self._endings.measure(self.record),
            stdout_bytes=stdout.position + stdout.queued,
            stderr_bytes=stderr.position + stderr.queued,
        )
