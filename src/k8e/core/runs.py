"""Commands in the foreground: somebody waits for them, and when nobody does any more they are ended.

A run is on record before its command starts, so that after a crash it is known as lost rather than unknown. Nothing
here starts a command twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.journal import note
from k8e.core.live import Gone, Live
from k8e.core.model import OUTPUT_LIMIT, Caller, Chunk, RunResult, RunSpec, Status
from k8e.core.output import HeadTail
from k8e.core.provisioning import merge_env
from k8e.core.records import RunRecord
from k8e.core.sessions import LOST, Opened, Sessions
from k8e.core.translation import translate
from k8e.core.verdict import OOM_CODE, judge, suspect_oom
from k8e.link.errors import LinkError, NotStarted
from k8e.link.model import ByteReader, ExecSpec, Outcome, Process

KEPT_RUNS: Final = 1000  # ended ones on record, of one session
GRACE: Final = 2.0  # between TERM and KILL
_AHEAD: Final = 2  # chunks read before somebody asks for them


class Foreground:
    """Implements `model.LiveRun`. Whether or not anybody asks for the result, the end is waited for and recorded."""

    def __init__(self, runs: Runs, opened: Opened, record: RunRecord, process: Process) -> None:
        self.record = record
        self.live = opened.live
        self._runs = runs
        self._process = process
        self._loss: Exception | None = None
        self._use = contextlib.ExitStack()
        self._use.enter_context(self.live.in_use())
        self._settled = runs.sessions.tasks.spawn(self._settle(), watched=True)
        runs.sessions.tasks.spawn(runs.sessions.store.set_command(record.run_id, process.id))

    @property
    def run_id(self) -> str:
        return self.record.run_id

    async def output(self) -> AsyncGenerator[Chunk, None]:
        ended = False
        queue: asyncio.Queue[Chunk | None] = asyncio.Queue(_AHEAD)
        pumps = [
            asyncio.create_task(self._pump(1, self._process.stdout, queue)),
            asyncio.create_task(self._pump(2, self._process.stderr, queue)),
        ]
        watch = asyncio.create_task(self._watch(queue))
        try:
            open_streams = len(pumps)
            while open_streams:
                chunk = await queue.get()
                if chunk is not None:
                    yield chunk
                    continue
                open_streams = 0 if self._lost else open_streams - 1
            ended = True
        finally:
            for task in (*pumps, watch):
                task.cancel()
            if not ended:
                self.leave()

    @property
    def _lost(self) -> bool:
        return self._loss is not None or self.live.gone.done()

    async def _pump(self, stream: int, reader: ByteReader, queue: asyncio.Queue[Chunk | None]) -> None:
        try:
            while content := await reader.read():
                await queue.put(Chunk(stream, content))
        except LinkError as error:
            self._loss = error  # the result says what it means
        await queue.put(None)

    async def _watch(self, queue: asyncio.Queue[Chunk | None]) -> None:
        await asyncio.wait({self.live.gone})
        await queue.put(None)

    async def collect(self, stdin: bytes) -> RunResult:
        """All of it: both streams within bounds, and the result."""
        streams = {1: HeadTail(), 2: HeadTail()}
        feeder = asyncio.create_task(self.feed(stdin)) if stdin else None
        try:
            async for chunk in self.output():
                streams[chunk.stream].feed(chunk.data)
            result = await self.result()
        finally:
            if feeder is not None:
                feeder.cancel()
        stdout, stderr = streams[1].take(), streams[2].take()
        # Also says what a broken connection cost.
        truncated = result.stdout_bytes > len(stdout) or result.stderr_bytes > len(stderr)
        return replace(result, stdout=stdout, stderr=stderr, truncated=truncated)

    async def feed(self, stdin: bytes) -> None:
        await self.write_stdin(stdin)
        await self.close_stdin()

    async def write_stdin(self, data: bytes) -> None:
        # That a command wants less than it is given is its own business; that it is lost is what the result says.
        with contextlib.suppress(LinkError):
            if data:
                await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def result(self) -> RunResult:
        try:
            return await asyncio.shield(self._settled)
        except asyncio.CancelledError:
            self.leave()
            raise

    async def kill(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody waits any more: ends the tree and drops the rest of the output."""
        if not self._settled.done():
            self._process.discard()
            self._runs.sessions.tasks.spawn(self.end())

    async def end(self) -> None:
        """Ends the tree; whoever reads goes on to the end of the output."""
        try:
            await self._process.end(GRACE)
        except LinkError as error:
            self._loss = error

    async def _settle(self) -> RunResult:
        try:
            try:
                outcome = await self._wait()
            except (LinkError, Gone) as error:
                return await self._runs.conclude(self.live, self.record, error)
            return await self._runs.finish(self.live, self.record, outcome)
        finally:
            self._runs.running.pop(self.run_id, None)
            self._use.close()

    async def _wait(self) -> Outcome:
        waiting = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {waiting, self.live.gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        await asyncio.wait({waiting})
        raise self.live.gone.result()


class Runs:
    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.running: dict[str, Foreground] = {}

    async def run(self, caller: Caller, spec: RunSpec) -> RunResult:
        return await (await self._start(caller, spec, stdin=bool(spec.stdin))).collect(spec.stdin)

    async def start(self, caller: Caller, spec: RunSpec) -> Foreground:
        run = await self._start(caller, spec, stdin=True)
        if spec.stdin:
            self.sessions.tasks.spawn(run.feed(spec.stdin))
        return run

    async def _start(self, caller: Caller, spec: RunSpec, *, stdin: bool) -> Foreground:
        began = self.sessions.clock.monotonic()
        plan = replace(check_run(spec), stdin=stdin)
        opened = await self.sessions.open(caller, spec.session_id)
        launching = self.sessions.tasks.spawn(self._launch(opened, plan), watched=True)
        try:
            await asyncio.wait({launching})
        except asyncio.CancelledError:
            self.sessions.tasks.spawn(self._take_back(launching))
            raise
        self.sessions.metrics.start_seconds.observe(self.sessions.clock.monotonic() - began)
        return launching.result()

    async def _launch(self, opened: Opened, plan: ExecSpec) -> Foreground:
        with opened.live.in_use():
            record = await self.record(opened.live, background=False)
            process = await self.launch(opened, record, place_run(opened, plan))
            run = self.running[record.run_id] = Foreground(self, opened, record, process)
        return run

    async def _take_back(self, launching: asyncio.Task[Foreground]) -> None:
        """Who asked for it left while it was started."""
        await asyncio.wait({launching})
        if not launching.cancelled() and launching.exception() is None:
            launching.result().leave()

    async def record(self, live: Live, *, background: bool) -> RunRecord:
        health = await self.sessions.examine(live)
        if not health.alive:
            raise self.sessions.describe_loss(live)
        record = RunRecord(
            run_id=f"run-{secrets.token_hex(8)}",
            sandbox=live.sandbox,
            background=background,
            started=self.sessions.clock.wall(),
            oom_before=health.oom_kills,
        )
        await self.sessions.store.insert_run(record, KEPT_RUNS)
        return record

    async def launch(self, opened: Opened, record: RunRecord, spec: ExecSpec) -> Process:
        try:
            return await opened.sandbox.start(spec)
        except NotStarted as error:
            await self.sessions.store.forget_run(record.run_id)
            raise translate(error, "the command") from error
        except ValueError as error:  # what only the link can measure
            await self.sessions.store.forget_run(record.run_id)
            raise Fault(Kind.INVALID, "invalid_argument", str(error), field="argv") from error
        except LinkError as error:
            await self.conclude(opened.live, record, error)
            raise translate(error, "starting the command") from error

    # The end of a run

    async def finish(self, live: Live, record: RunRecord, outcome: Outcome) -> RunResult:
        oom = False
        if outcome.exit_code != 0:
            health = await self.sessions.examine(live)
            kills, alone = health.oom_kills - record.oom_before, live.uses <= 1 and not live.background
            oom = suspect_oom(outcome.exit_code, outcome.signal, kills=kills, alone=alone)
        status, code = judge(outcome.exit_code, outcome.signal, outcome.cause, oom=oom)
        ended = replace(
            record,
            status=status,
            exit_code=code,
            stdout_bytes=outcome.stdout_bytes,
            stderr_bytes=outcome.stderr_bytes,
            truncated=max(outcome.stdout_bytes, outcome.stderr_bytes) > OUTPUT_LIMIT,
            duration_ms=round(outcome.wall_seconds * 1000),
        )
        self.sessions.metrics.exec_seconds.observe(outcome.wall_seconds)
        return await self.keep(ended, live)

    async def conclude(self, live: Live, record: RunRecord, error: Exception) -> RunResult:
        """The command's end was not seen. Says so, unless it is known that memory ended the whole sandbox."""
        if not isinstance(error, Gone):
            await self.sessions.examine(live)
        if live.record.reason == LOST and live.oom_kills > record.oom_before:
            return await self.keep(replace(record, status=Status.OOM_KILLED, exit_code=OOM_CODE), live)
        if isinstance(error, Gone):
            await self.keep(replace(record, status=Status.LOST), live)
            raise Fault(
                Kind.LOST,
                "session_ended",
                "the session ended while the command ran",
                detail=str(error),
                hint="Create a new session; look at what the command had done before you run it again.",
            ) from error
        await self.keep(replace(record, status=Status.LOST), live)
        raise translate(error, "the command") from error

    async def keep(self, record: RunRecord, live: Live | None = None) -> RunResult:
        record = replace(record, finished=self.sessions.clock.wall())
        self.sessions.metrics.execs.add(record.status.value)
        note("run_ended", run=record.run_id, sandbox=record.sandbox, status=record.status.value,
             exit_code=record.exit_code, ms=record.duration_ms)  # fmt: skip
        await self.sessions.store.finish_run(record)
        return record.show(live.session_id if live else "")


def check_run(spec: RunSpec) -> ExecSpec:
    """The command as far as it is known without its sandbox."""
    env = checks.check_env("env", spec.env)
    checks.check_content("stdin", spec.stdin)
    return ExecSpec(
        checks.check_argv(spec),
        env,
        checks.check_path("workdir", spec.workdir) if spec.workdir else b"",
        timeout=checks.check_timeout(spec.timeout),
        grace=GRACE,
    )


def place_run(opened: Opened, plan: ExecSpec) -> ExecSpec:
    place = opened.place
    env = merge_env(place.env, opened.live.env, plan.env)
    return replace(plan, env=env, cwd=plan.cwd or place.workspace, identity=place.user)
