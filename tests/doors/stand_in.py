"""A service to put behind the door where no sandbox is needed: sessions in a dictionary, commands as processes of this
machine. What it leaves out is what a door must not depend on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from k8e.core.contract import LiveRun, SandboxService
from k8e.core.errors import Fault, Kind
from k8e.core.model import (
    Caller,
    ChildSpec,
    Chunk,
    HostsChange,
    Phase,
    RunResult,
    RunSpec,
    ServiceStatus,
    Session,
    SessionSpec,
    Status,
)
from k8e.engine import Limits, Runtime, RuntimeReport
from k8e.link.model import Cause, CommandInfo, Entry, FileType
from k8e.policy import HostList


class Process:
    """Implements `LiveRun`."""

    def __init__(
        self,
        run_id: str,
        session_id: str,
        process: asyncio.subprocess.Process,
        ending: Callable[[], None] | None = None,
    ) -> None:
        self.run_id = run_id
        self.process = process
        self.killed = asyncio.Event()
        self.session_id = session_id
        self.sizes: list[tuple[int, int]] = []
        self._end = ending or (lambda: None)
        self.counts = {1: 0, 2: 0}

    async def output(self) -> AsyncIterator[Chunk]:
        queue: asyncio.Queue[Chunk | None] = asyncio.Queue(1)

        async def pump(stream: int, reader: asyncio.StreamReader | None) -> None:
            assert reader is not None
            while data := await reader.read(65536):
                self.counts[stream] += len(data)
                await queue.put(Chunk(stream, (data,)))
            await queue.put(None)

        async with asyncio.TaskGroup() as pumps:
            tasks = [pumps.create_task(pump(1, self.process.stdout)), pumps.create_task(pump(2, self.process.stderr))]
            try:
                for _ in tasks:
                    while (chunk := await queue.get()) is not None:
                        yield chunk
            finally:
                for task in tasks:
                    task.cancel()

    async def write_stdin(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(data)
            await self.process.stdin.drain()

    async def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    async def resize(self, rows: int, columns: int) -> None:
        self.sizes.append((rows, columns))

    async def result(self) -> RunResult:
        code = await self.process.wait()
        self._end()
        return RunResult(
            run_id=self.run_id,
            session_id=self.session_id,
            status=Status.COMPLETED if code >= 0 else Status.KILLED,
            exit_code=code if code >= 0 else 128 - code,
            stdout=b"",
            stderr=b"",
            stdout_bytes=self.counts[1],
            stderr_bytes=self.counts[2],
            truncated=False,
            duration_ms=1,
        )

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # asyncio does not tell of the end while a pipe holds bytes that are not read.
        self.process._transport.close()  # type: ignore[attr-defined]
        await self.process.wait()
        self._end()
        self.killed.set()


@dataclass
class StandIn:
    """Implements `SandboxService`."""

    sessions_by_id: dict[str, Session] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    entries: Sequence[Entry] = ()
    callers: list[Caller] = field(default_factory=list)
    specs: list[SessionSpec | ChildSpec | RunSpec] = field(default_factory=list)
    turned_away: list[tuple[str, str, str]] = field(default_factory=list)
    changes: list[HostsChange] = field(default_factory=list)
    starts: list[tuple[dict[str, str], dict[str, str]]] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    results: dict[str, RunResult] = field(default_factory=dict)
    fault: Exception | None = None  # raised by whatever is asked next
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.sessions = StandInSessions(self)
        self.runs = StandInRuns(self)
        self.files = StandInFiles(self)

    def meet(self, caller: Caller) -> None:
        self.callers.append(caller)
        if self.fault is not None:
            raise self.fault

    async def expose(self) -> None:
        pass

    def turn_away(self, who: str, call: str, code: str, source: str = "") -> None:
        self.turned_away.append((who, call, code))

    @property
    def default_limits(self) -> Limits:
        return Limits()

    async def status(self, caller: Caller) -> ServiceStatus:
        self.meet(caller)
        reports = (RuntimeReport(Runtime.GVISOR, True, "release-1", notes=("own network stack",)),)
        return ServiceStatus(True, "0.1.0", Runtime.GVISOR, reports, len(self.sessions_by_id), 3)


class StandInSessions:
    """Implements `SessionService`."""

    def __init__(self, service: StandIn) -> None:
        self._service = service

    async def create(self, caller: Caller, spec: SessionSpec) -> Session:
        self._service.meet(caller)
        self._service.specs.append(spec)
        session = Session(
            session_id=spec.session_id or f"sess-{len(self._service.sessions_by_id) + 1}",
            tenant=spec.tenant or "default",
            owner=caller.uid,
            phase=Phase.ACTIVE,
            runtime=spec.runtime or Runtime.GVISOR,
            image=spec.image,
            limits=spec.limits or Limits(),
            env_keys=tuple(sorted(spec.env)),
            created=1.5,
            last_used=2.5,
            ttl=3600.0 if spec.ttl is None else spec.ttl,
            hosts=HostList.parse(["usual.test"] if spec.allowed_hosts is None else spec.allowed_hosts),
            persistent=spec.persistent,
            labels=spec.labels,
            secret_keys=tuple(sorted(spec.secrets)),
            shape=spec.shape,
        )
        self._service.sessions_by_id[session.session_id] = session
        return session

    async def create_child(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        parent = await self.get(caller, parent_session_id)
        self._service.specs.append(spec)
        session_id = spec.session_id or f"sess-{len(self._service.sessions_by_id) + 1}"
        labels = {"agent_type": spec.agent_type} if spec.agent_type else {}
        child = replace(
            parent, session_id=session_id, parent=parent.session_id, labels=labels, workdir=spec.workspace_path
        )
        self._service.sessions_by_id[session_id] = child
        self._service.sessions_by_id[parent.session_id] = replace(parent, children=(*parent.children, session_id))
        return child

    async def get(self, caller: Caller, session_id: str) -> Session:
        self._service.meet(caller)
        if session_id not in self._service.sessions_by_id:
            raise Fault(Kind.NOT_FOUND, "session_not_found", f"there is no session {session_id}", hint="Create one.")
        return self._service.sessions_by_id[session_id]

    async def list(self, caller: Caller, *, all_phases: bool = False, loads: bool = False) -> Sequence[Session]:
        self._service.meet(caller)
        found = self._service.sessions_by_id.values()
        return [session for session in found if all_phases or session.phase is Phase.ACTIVE]

    async def destroy(self, caller: Caller, session_id: str) -> None:
        await self.get(caller, session_id)
        self._service.sessions_by_id[session_id] = replace(
            self._service.sessions_by_id[session_id], phase=Phase.DESTROYED
        )

    async def stop(self, caller: Caller, session_id: str) -> Session:
        session = await self.get(caller, session_id)
        self._service.sessions_by_id[session_id] = replace(session, phase=Phase.STOPPED)
        return self._service.sessions_by_id[session_id]

    async def start(
        self,
        caller: Caller,
        session_id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        session = await self.get(caller, session_id)
        self._service.starts.append((dict(env or {}), dict(secrets or {})))
        self._service.sessions_by_id[session_id] = replace(session, phase=Phase.ACTIVE)
        return self._service.sessions_by_id[session_id]

    async def set_hosts(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        session = await self.get(caller, session_id)
        self._service.changes.append(change)
        if change.hosts is None:
            hosts = session.hosts.minus(HostList.parse(change.remove)).plus(HostList.parse(change.add))
        else:
            hosts = HostList.parse(change.hosts)
        self._service.sessions_by_id[session_id] = replace(session, hosts=hosts)
        return self._service.sessions_by_id[session_id]


class StandInRuns:
    """Implements `RunService`."""

    def __init__(self, service: StandIn) -> None:
        self._service = service

    async def run(self, caller: Caller, spec: RunSpec) -> RunResult:
        if spec.background:
            await self._service.sessions.get(caller, spec.session_id)
            return RunResult("run-1", spec.session_id, Status.RUNNING, None, b"", b"", 0, 0, False, 0)
        if spec.code in self._service.results:
            return replace(self._service.results[spec.code], session_id=spec.session_id)
        live = await self._start(caller, spec)
        streams = {1: b"", 2: b""}
        finished = False
        try:
            async with asyncio.TaskGroup() as feeding:
                feeding.create_task(feed(live, spec.stdin))
                async for chunk in live.output():
                    streams[chunk.stream] += chunk.data
            result = await live.result()
            finished = True
        finally:
            if not finished:
                await live.kill()
        return replace(result, stdout=streams[1], stderr=streams[2])

    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun:
        return await self._start(caller, spec)

    async def start_once(
        self,
        caller: Caller,
        session: SessionSpec,
        run: RunSpec,
        *,
        keep: bool = False,
        until: asyncio.Future[None] | None = None,
    ) -> LiveRun:
        made = await self._service.sessions.create(caller, session)

        def end() -> None:
            self._service.sessions_by_id[made.session_id] = replace(made, phase=Phase.DESTROYED)

        return await self._start(caller, replace(run, session_id=made.session_id), None if keep else end)

    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        made = await self._service.sessions.create(caller, session)
        result = await self.run(caller, replace(run, session_id=made.session_id))
        if not keep:
            await self._service.sessions.destroy(caller, made.session_id)
        return result

    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        await self._find(caller, run_id).signal(number)

    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None:
        await self._find(caller, run_id).resize(rows, columns)

    def _find(self, caller: Caller, run_id: str) -> Process:
        self._service.meet(caller)
        for process in self._service.processes:
            if process.run_id == run_id:
                return process
        raise Fault(Kind.NOT_FOUND, "run_not_found", f"there is no run {run_id}", hint="look")

    async def _start(self, caller: Caller, spec: RunSpec, ending: Callable[[], None] | None = None) -> Process:
        await self._service.sessions.get(caller, spec.session_id)
        self._service.specs.append(spec)
        argv = spec.argv or (b"bash", b"-c", spec.code.encode("utf-8", "surrogateescape"))
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **spec.env},
        )
        live = Process(f"run-{len(self._service.processes) + 1}", spec.session_id, process, ending)
        self._service.processes.append(live)
        self._service.started.set()
        return live

    async def poll(
        self, caller: Caller, run_id: str, *, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0
    ) -> RunResult:
        self._service.meet(caller)
        if run_id not in self._service.results:
            raise Fault(Kind.NOT_FOUND, "run_not_found", f"there is no run {run_id}", hint="look")
        return self._service.results[run_id]

    async def kill(self, caller: Caller, run_id: str) -> bool:
        await self.poll(caller, run_id)
        return True

    async def commands(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]:
        await self._service.sessions.get(caller, session_id)
        return [CommandInfo(1, 7, False, False, 3, None, Cause.ITSELF, 9.5, 10, 11, b"bash")]

    async def list(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        await self._service.sessions.get(caller, session_id)
        return list(self._service.results.values())

    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult:
        return await self.run(caller, RunSpec(session_id, argv=(b"echo", *(name.encode() for name in packages))))


class StandInFiles:
    """Implements `FileService`."""

    def __init__(self, service: StandIn) -> None:
        self._service = service

    async def write(self, caller: Caller, session_id: str, path: str, content: bytes, *, append: bool) -> int:
        await self._service.sessions.get(caller, session_id)
        self._service.contents[path] = (self._service.contents.get(path, b"") if append else b"") + content
        return len(content)

    async def read(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> bytes:
        await self._service.sessions.get(caller, session_id)
        if path not in self._service.contents:
            raise Fault(Kind.NOT_FOUND, "file_not_found", f"there is no file {path}", hint="look")
        content = self._service.contents[path][offset:]
        return content if length is None else content[:length]

    async def tree(
        self, caller: Caller, session_id: str, path: str, *, below: bool = True
    ) -> tuple[Entry, Sequence[Entry]]:
        await self._service.sessions.get(caller, session_id)
        return make_entry(path.encode(), FileType.DIRECTORY), self._service.entries

    async def make_folder(self, caller: Caller, session_id: str, path: str) -> None:
        await self._service.sessions.get(caller, session_id)
        self._service.contents[path + "/"] = b""

    async def remove(self, caller: Caller, session_id: str, path: str, *, recursive: bool = False) -> None:
        await self.read(caller, session_id, path)
        del self._service.contents[path]

    async def upload(
        self,
        caller: Caller,
        session_id: str,
        path: str,
        pieces: AsyncIterable[bytes],
        *,
        append: bool,
        permissions: int | None = None,
    ) -> int:
        content = b"".join([piece async for piece in pieces])
        return await self.write(caller, session_id, path, content, append=append)

    async def download(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        content = await self.read(caller, session_id, path)

        async def give() -> AsyncIterator[bytes]:
            yield content[offset:][:length]

        return give()

    async def list(self, caller: Caller, session_id: str, path: str = "", *, since: float = 0) -> Sequence[Entry]:
        await self._service.sessions.get(caller, session_id)
        return [entry for entry in self._service.entries if entry.mtime_ns > since * 1e9]


async def feed(live: LiveRun, content: bytes) -> None:
    if content:
        await live.write_stdin(content)
    await live.close_stdin()


def make_entry(name: bytes, kind: FileType = FileType.FILE, *, size: int = 0, mtime: float = 0) -> Entry:
    return Entry(name, kind, 0o644, 0, 0, size, int(mtime * 1e9))


def _check(service: StandIn) -> SandboxService:
    """mypy's word for it that this is one."""
    return service
