"""Runs over gRPC: to their end, streamed, interactive, or in the background."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Final

from k8e.core.contract import RunService
from k8e.core.model import Chunk
from k8e.doors.errors import invalid
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import LONG, MARGIN, Call, Handler
from k8e.doors.grpc.errors import malformed
from k8e.doors.run_stream import stream_run

STDIN_PIECE: Final = 1 << 20
MAX_WAIT: Final = 60.0  # of one poll


class RunHandlers:
    def __init__(self, runs: RunService) -> None:
        self._runs = runs

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            "Exec": Handler(self._exec, single=True),
            "ExecStream": Handler(self._exec_stream),
            "ExecInteractive": Handler(self._exec_interactive),
            "PollRun": Handler(self._poll),
            "KillRun": Handler(self._kill),
            "Ps": Handler(self._ps),
            "Log": Handler(self._log),
            "PipInstall": Handler(self._pip_install),
        }

    async def _exec(self, call: Call) -> None:
        spec = requests.read_run_spec(await call.read_one(pb.ExecRequest))
        if not spec.background:
            call.allow(_seconds_for(spec.timeout))
        await call.write(answers.show_run(await self._runs.run(call.caller, spec)))

    async def _exec_stream(self, call: Call) -> None:
        await self._run_live(call, await call.read_one(pb.ExecRequest), fed=False)

    async def _exec_interactive(self, call: Call) -> None:
        first = await call.read_one(pb.ExecInput)
        if first.WhichOneof("input") != "start":
            raise malformed("the first message has no start")
        with call.idle():
            await self._run_live(call, first.start, fed=True)

    async def _run_live(self, call: Call, request: pb.ExecRequest, *, fed: bool) -> None:
        spec = requests.read_run_spec(request)
        if spec.background:
            raise invalid("background", "a background run has no stream", hint="Exec starts it, PollRun looks.")
        call.allow(_seconds_for(spec.timeout))
        live = await self._runs.start(call.caller, replace(spec, stdin=b""))

        async def begin() -> None:
            started = pb.ExecStarted(run_id=live.run_id, session_id=spec.session_id)
            await call.write(pb.ExecFrame(started=started))

        async def send(chunk: Chunk) -> None:
            output = pb.ExecOutput(stream=pb.Stream.Name(chunk.stream), data=chunk.data)
            await call.write(pb.ExecFrame(output=output))

        result = await stream_run(live, send, stdin=_take_stdin(spec.stdin, call if fed else None), begin=begin)
        await call.write(pb.ExecFrame(result=answers.show_run(result)))

    async def _poll(self, call: Call) -> None:
        request = await call.read_one(pb.PollRunRequest)
        if 0 < request.wait <= MAX_WAIT:  # core refuses what makes no sense
            call.allow(request.wait + MARGIN)
        run = await self._runs.poll(
            call.caller,
            request.run_id,
            stdout_from=request.stdout_from,
            stderr_from=request.stderr_from,
            wait=request.wait,
        )
        await call.write(pb.PollRunResponse(run=answers.show_run(run)))

    async def _kill(self, call: Call) -> None:
        request = await call.read_one(pb.KillRunRequest)
        had_ended = await self._runs.kill(call.caller, request.run_id)
        await call.write(pb.KillRunResponse(had_ended=had_ended))

    async def _ps(self, call: Call) -> None:
        request = await call.read_one(pb.PsRequest)
        commands = await self._runs.commands(call.caller, request.session_id)
        await call.write(pb.PsResponse(processes=map(answers.show_process, commands)))

    async def _log(self, call: Call) -> None:
        request = await call.read_one(pb.LogRequest)
        runs = await self._runs.list(call.caller, request.session_id)
        await call.write(pb.LogResponse(runs=map(answers.show_run, runs)))

    async def _pip_install(self, call: Call) -> None:
        request = await call.read_one(pb.PipInstallRequest)
        call.allow(_seconds_for(request.timeout or LONG))
        run = await self._runs.pip_install(
            call.caller, request.session_id, tuple(request.packages), seconds=request.timeout or None
        )
        answer = pb.PipInstallResponse(
            output=run.stdout + run.stderr, exit_code=run.exit_code, run=answers.show_run(run)
        )
        await call.write(answer)


def _seconds_for(seconds: float) -> float:
    """The seconds for a call that waits for a command. Core refuses a timeout that makes no sense."""
    return MARGIN + (seconds if 0 < seconds <= 86_400 else 0)


async def _take_stdin(content: bytes, call: Call | None) -> AsyncGenerator[bytes, None]:
    """Yields the stdin of the request, and then that of the messages after it."""
    if content:
        yield content
    while call and (message := await call.read_idly(pb.ExecInput)) is not None:
        if message.WhichOneof("input") != "stdin":
            raise malformed("a later message has no stdin")
        if len(message.stdin) > STDIN_PIECE:
            raise invalid("stdin", f"{len(message.stdin)} bytes at once, the limit is {STDIN_PIECE}")
        yield message.stdin
