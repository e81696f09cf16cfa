"""The audit log: which caller did what to which session. JSON lines, only ever appended.

Usually callers do not wait for it: its lines are written a moment later, many at once when there are many, in the loop,
like the journal of runs: handing them to a thread cost more than all of the writing. A disk that is full costs lines,
which are counted, and said in the log as soon as it can be written again. With `[audit] required` nothing is done that
is not in the log, on disk, first; a thread waits for the disk.

Environment values, stdin, output and the content of files are never in it; code only as its length and hash, unless the
settings ask for it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from k8e.core.clock import Clock
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import warn
from k8e.core.log.metrics import Metrics
from k8e.core.model import Caller, RunSpec
from k8e.core.tasks import wait_done, wait_result
from k8e.damage import Damage, Damaged, Damages, check_file
from k8e.settings import AuditSettings

MAX_WAITING: Final = 10_000  # lines
LOGGED_CODE: Final = 128 << 10  # bytes of a longer program; its length and hash are those of all of it
DELAY: Final = 0.02  # so that a command does not share its moment with the writing of its line
_ENCODER: Final = json.JSONEncoder(default=str)  # json.dumps would make one for each line
_STRANGE: Final = ("session_not_found", "run_not_found", "approval_not_found")  # it may be another caller's


class _Line(NamedTuple):
    content: bytes
    written: asyncio.Future[None] | None = None  # a caller waits


class AuditFile:
    """The file and its predecessors. Used by one thread at a time."""

    def __init__(self, path: Path, size: int, files: int) -> None:
        self._path = path
        self._size = size
        self._files = files
        self._descriptor = -1
        self.damages = Damages(path.parent)

    def write(self, content: bytes, *, sync: bool) -> None:
        """All of it or nothing. OSError."""
        if self._descriptor < 0:
            self._open()
        before = os.fstat(self._descriptor).st_size
        if before and before + len(content) > self._size:
            self._rotate()
            before = 0
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if sync:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, before)  # no half a line
            raise

    def sync(self) -> None:
        if self._descriptor >= 0:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        for path in (self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._files))):
            try:
                check_file(path)
            except FileNotFoundError:
                continue
            except Damaged as error:  # it could not be written, or others could have written it
                self.damages.set_aside(path, error)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # after a line that the power took

    def _rotate(self) -> None:
        """audit.log becomes audit.log.1 and so on; the oldest goes."""
        self.close()
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._files))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                newer.replace(older)
        if len(names) == 1:
            self._path.unlink()
        self._open()


class Audit:
    def __init__(self, path: Path | None, settings: AuditSettings, metrics: Metrics, clock: Clock) -> None:
        """Without a path nothing is kept."""
        self.required = settings.required
        self._with_code = settings.code
        self._file = AuditFile(path, settings.size, settings.files) if path else None
        self._metrics = metrics
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "k8e-audit")
        self._waiting: list[_Line] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._syncing = False  # the thread has the file
        self._lost = 0  # since the last line that was written
        self._unsynced = False

    def note_damages(self, damages: Sequence[Damage] = ()) -> None:
        """Files that were found damaged, the log's own among them."""
        own = self._file.damages.take() if self._file else ()
        for each in (*own, *damages):
            warn("state_damaged", path=each.path, cause=each.cause, aside=each.aside)
            self.note("state_damaged", path=each.path, cause=each.cause, aside=each.aside)

    def note(self, event: str, **fields: object) -> None:
        """Without waiting: for what has happened already, and for what must happen also without the log."""
        self._append(event, fields, None)

    async def record(self, event: str, **fields: object) -> None:
        """Before something is done. Raises Fault when it is required to be in the log and cannot be."""
        if not self.required:
            return self._append(event, fields, None)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._append(event, fields, written)
        try:
            await wait_result(written)
        except OSError as error:
            raise Fault(
                Kind.UNAVAILABLE,
                "audit_unavailable",
                "nothing is done that the audit log cannot take, and it cannot be written",
                detail=str(error),
                hint="Is the disk with the state directory full?",
            ) from error
        return None

    def note_fault(self, call: str, arguments: tuple[object, ...], fault: Fault) -> None:
        """A caller sees no difference between what they may not have and what is not there. A reader of the log sees
        every try of either."""
        self._metrics.failures.add(fault.code)
        if fault.kind in (Kind.DENIED, Kind.UNAUTHENTICATED) or fault.code in _STRANGE:
            caller, named = arguments[0], arguments[1] if len(arguments) > 1 else ""
            label = caller.label if isinstance(caller, Caller) else ""
            subject = named if isinstance(named, str) else getattr(named, "session_id", "")
            self.note("access_refused", caller=label, call=call, subject=subject[:100], code=fault.code)

    def describe_run(self, spec: RunSpec) -> dict[str, object]:
        """The fields of a run's command."""
        code = b"\0".join(spec.argv) if spec.argv else spec.code.encode("utf-8", "surrogateescape")
        about: dict[str, object] = {
            "language": "argv" if spec.argv else spec.language.value,
            "code_bytes": len(code),
            "code_sha256": hashlib.sha256(code).hexdigest(),
            "env_keys": sorted(spec.env),
            **({"user": spec.user} if spec.user else {}),
        }
        return {**about, "code": code[:LOGGED_CODE].decode(errors="replace")} if self._with_code else about

    async def sync(self) -> None:
        """Part of the upkeep: so much and no more is lost with the power."""
        if self._file is not None and self._unsynced:
            self._unsynced, self._syncing = False, True
            syncing = asyncio.get_running_loop().run_in_executor(self._thread, self._file.sync)
            syncing.add_done_callback(self._end_sync)
            await wait_done(syncing)

    def _end_sync(self, synced: asyncio.Future[None]) -> None:
        """Also when the caller has left: until then the file is the thread's."""
        self._syncing = False
        if not synced.cancelled() and (error := synced.exception()):
            warn("audit_not_synced", cause=error)

    async def close(self) -> None:
        self._begin()
        while self._writing is not None:
            await wait_done(self._writing)
        await self.sync()
        file, self._file = self._file, None
        if file is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, file.close)
        self._thread.shutdown()

    # Writing

    def _append(self, event: str, fields: dict[str, object], written: asyncio.Future[None] | None) -> None:
        if self._file is None:
            if written is not None:
                written.set_result(None)
            return
        if len(self._waiting) >= MAX_WAITING and written is None:
            self._lose(1, "too many lines wait")
            return
        self._waiting.append(_Line(self._format(event, fields), written))
        if written is not None:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None or not self._waiting or self._file is None:
            return
        if self._syncing or any(line.written for line in self._waiting):
            self._writing = asyncio.get_running_loop().create_task(self._write_all(self._file))
        else:
            lines, self._waiting = self._waiting, []
            self._write_here(self._file, lines)

    def _format(self, event: str, fields: dict[str, Any]) -> bytes:
        content = {"at": round(self._clock.wall(), 3), "event": event, **fields}
        return _ENCODER.encode(content).encode("ascii") + b"\n"

    async def _write_all(self, file: AuditFile) -> None:
        try:
            while self._waiting:
                lines, self._waiting = self._waiting, []
                await self._write_some(file, lines)
        finally:
            self._writing = None

    def _join(self, lines: Sequence[_Line]) -> bytes:
        content = b"".join(line.content for line in lines)
        return self._format("lines_lost", {"count": self._lost}) + content if self._lost else content

    def _write_here(self, file: AuditFile, lines: Sequence[_Line]) -> None:
        try:
            file.write(self._join(lines), sync=False)
        except OSError as error:
            self._lose(len(lines), str(error))
        else:
            self._lost, self._unsynced = 0, True

    async def _write_some(self, file: AuditFile, lines: Sequence[_Line]) -> None:
        sync = any(line.written for line in lines)
        content = self._join(lines)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, lambda: file.write(content, sync=sync))
        except OSError as error:
            self._lose(len(lines), str(error))
            for line in lines:
                if line.written is not None and not line.written.done():
                    line.written.set_exception(error)
            return
        self._lost = 0
        self._unsynced = self._unsynced or not sync
        for line in lines:
            if line.written is not None and not line.written.done():
                line.written.set_result(None)

    def _lose(self, count: int, cause: str) -> None:
        if not self._lost:
            warn("audit_not_written", cause=cause)
        self._lost += count
        self._metrics.audit_lost.add(amount=count)


class _Parts(Protocol):
    @property
    def audit(self) -> Audit: ...


class _Noun(Protocol):
    """A class that implements a protocol of the contract."""

    @property
    def _parts(self) -> _Parts: ...


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=_Noun)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def call(name: str) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Marks a method that doors call, caller first, with the name that the audit log has for it: the faults that it
    ends with are counted, and what a caller may not have is logged."""

    def mark(method: Method[S, P, T]) -> Method[S, P, T]:
        @functools.wraps(method)
        async def answer(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await method(self, *args, **kwargs)
            except Fault as fault:
                self._parts.audit.note_fault(name, args, fault)
                raise

        return answer

    return mark
