"""A background run. Generated from _async_background.py by scripts/unasync.py: change that one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import DeadlineExceeded
from sandbox_client._model import Chunk, ChunkReader, RunResult

# How a run stands: with the output beyond what the caller has had, or a number of seconds later.
Look = Callable[[pb.PollRunRequest], RunResult]

_PATIENCE = 20.0  # seconds of one call
_ALL = 1 << 62  # more output than there is


class BackgroundRun:
    """A run in the background: its output as it comes, its end, and a way to end it. It goes on when its client is
    gone; `SandboxClient.attach` finds it again by its `run_id`.

    Iterating yields the output of both streams from the beginning, and ends with the run. A reader that is too slow
    misses the middle of what exceeds 1 MiB: `lost` counts these bytes.
    """

    def __init__(self, first: RunResult, look: Look, kill: Callable[[str], bool]) -> None:
        self.run_id = first.run_id
        self.session_id = first.session_id
        self.lost = 0
        self._last = first
        self._look = look
        self._kill = kill

    @property
    def status(self) -> str:
        """The status when the run was last looked at: running, completed, timed_out, killed, oom_killed or lost."""
        return self._last.status

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the run goes on, when it was last looked at, and when its end is not known."""
        return self._last.exit_code

    def poll(self) -> RunResult:
        """Returns how the run stands, with its output so far."""
        self._last = self._look(pb.PollRunRequest(run_id=self.run_id))
        return self._last

    def wait(self, timeout: float | None = None) -> RunResult:
        """Waits until the run has ended, and returns its result. DeadlineExceeded after `timeout` seconds: the run goes
        on."""
        due = None if timeout is None else time.monotonic() + timeout
        while self._last.status == "running":
            seconds = _PATIENCE if due is None else max(0.0, min(_PATIENCE, due - time.monotonic()))
            self._look_again(pb.PollRunRequest(stdout_from=_ALL, stderr_from=_ALL, wait=seconds))
            if due is not None and time.monotonic() >= due and self._last.status == "running":
                hint = "it goes on: wait again, or kill it"
                raise DeadlineExceeded("the run has not ended", code="deadline_exceeded", hint=hint)
        return self.poll()

    def kill(self) -> RunResult:
        """Ends the run with everything that it started, and returns its result. Fine for one that has ended."""
        self._kill(self.run_id)
        return self.poll()

    def __iter__(self) -> Iterator[Chunk]:
        reader = ChunkReader()
        stdout = stderr = 0
        while True:
            seen = self._look_again(pb.PollRunRequest(stdout_from=stdout, stderr_from=stderr, wait=_PATIENCE))
            ended = seen.status != "running"
            # While it runs, nothing means that the sandbox was too slow to tell: the next look has it.
            if seen.raw_stdout or ended:
                self.lost += max(0, seen.stdout_bytes - stdout - len(seen.raw_stdout))
                stdout = seen.stdout_bytes
            if seen.raw_stderr or ended:
                self.lost += max(0, seen.stderr_bytes - stderr - len(seen.raw_stderr))
                stderr = seen.stderr_bytes
            for stream, data in ((pb.STREAM_STDOUT, seen.raw_stdout), (pb.STREAM_STDERR, seen.raw_stderr)):
                if data:
                    yield reader.read(pb.ExecOutput(stream=stream, data=data))
            if ended:
                break
        for chunk in reader.rest():
            yield chunk

    def _look_again(self, request: pb.PollRunRequest) -> RunResult:
        request.run_id = self.run_id
        self._last = self._look(request)
        return self._last
