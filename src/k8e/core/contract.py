"""The contract between doors and core, one protocol for each noun. `Service` hands out a part for each.

Every method takes the caller first, decides what that caller may do, and raises Fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Protocol

from k8e.core.model import (
    Approval,
    Caller,
    ChildSpec,
    Chunk,
    HostsChange,
    NamedImage,
    PoolStatus,
    RunResult,
    RunSpec,
    ServiceStatus,
    Session,
    SessionSpec,
    TerminalSpec,
)
from k8e.engine import Limits
from k8e.engine.images import Credentials, Report
from k8e.link.model import CommandInfo, Entry


class SessionService(Protocol):
    async def create(self, caller: Caller, spec: SessionSpec) -> Session: ...
    async def create_child(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        """A session that shares its parent's workspace, may do no more than its parent, and ends with it."""

    async def get(self, caller: Caller, session_id: str) -> Session: ...
    async def list(self, caller: Caller, *, all_phases: bool = False, loads: bool = False) -> Sequence[Session]:
        """With `loads` each that is active has its load; a sandbox that does not answer soon has none."""

    async def destroy(self, caller: Caller, session_id: str) -> None: ...
    async def stop(self, caller: Caller, session_id: str) -> Session:
        """Ends what runs in a persistent session and keeps its files. Does nothing to a stopped one."""

    async def start(
        self,
        caller: Caller,
        session_id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        """Starts a stopped session on its files. Does nothing to a running one, unless `env` or `secrets` are given.
        `env` is added to the variables that the session had; its secrets have to be given again."""

    async def set_hosts(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        """In force and on record when it returns. Connections that the new list does not allow are cut."""


class RunService(Protocol):
    async def run(self, caller: Caller, spec: RunSpec) -> RunResult: ...
    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun: ...
    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        """Creates a session for this run alone. The session ends with the run, also when the caller leaves or the
        daemon dies. `keep`: the session stays once the command has started. `run.session_id` is ignored."""

    async def start_once(
        self,
        caller: Caller,
        session: SessionSpec,
        run: RunSpec,
        *,
        keep: bool = False,
        until: asyncio.Future[None] | None = None,
    ) -> LiveRun:
        """The same, with the output as it comes. `until`: the session stays until this is done as well, so that its
        caller can look at what the command left."""

    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        """To a foreground run. Does nothing to one that has ended, like `resize`."""

    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None:
        """Of a foreground run's terminal, or of one that a client is at."""

    async def kill(self, caller: Caller, run_id: str) -> bool:
        """Returns when the run has ended, and whether it had ended before the call; then nothing was done."""

    async def poll(
        self, caller: Caller, run_id: str, *, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0
    ) -> RunResult:
        """The run as it stands. A background run has its output from these bytes on, while it runs and as long as its
        session keeps it. Waits so many seconds for output or for the end, where there is neither."""

    async def list(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        """The runs of a session, oldest first, without output."""

    async def commands(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]:
        """The commands that run in a session now."""

    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult: ...


class LiveRun(Protocol):
    """A foreground run whose output is read as it comes. A caller that leaves it unfinished ends the command.

    stdin is open until `close_stdin`, unless the spec brought it. Input that the command does not read is dropped.
    """

    @property
    def run_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    def output(self) -> AsyncIterator[Chunk]: ...
    async def write_stdin(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def signal(self, number: int) -> None:
        """To the command and its process group, as a terminal would send it."""

    async def resize(self, rows: int, columns: int) -> None:
        """Of its terminal."""

    async def result(self) -> RunResult:
        """After the output ended; stdout and stderr are empty here, the counts are exact."""

    async def kill(self) -> None:
        """Ends the whole tree, if it still runs. A caller that leaves before the result calls this."""


class LiveOutput(Protocol):
    """The part of a run that a door streams. `kill` is called by a client that leaves before the result."""

    def output(self) -> AsyncIterator[Chunk]: ...
    async def write_stdin(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def result(self) -> RunResult: ...
    async def kill(self) -> None: ...


class TerminalService(Protocol):
    async def open(self, caller: Caller, spec: TerminalSpec) -> LiveTerminal:
        """A new terminal, or one that a client has left. The latest client has it; the one before it is told."""


class LiveTerminal(LiveOutput, Protocol):
    """A terminal that a client is at. A client that leaves does not end its command."""

    @property
    def run_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def started(self) -> float: ...
    @property
    def resumed(self) -> bool:
        """Whether it was there before; the output begins with what was last shown."""

    @property
    def others(self) -> Sequence[str]:
        """Terminals of the session at which other clients are."""

    async def resize(self, rows: int, columns: int) -> None: ...


class FileService(Protocol):
    async def write(self, caller: Caller, session_id: str, path: str, content: bytes, *, append: bool) -> int:
        """How many bytes were written. Missing directories are made. A file that is there is written in place, as a
        program of the default user would write it."""

    async def read(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> bytes:
        """At most one message."""

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
        """Of any size; how many bytes were written. Pieces are taken as fast as they can be written."""

    async def download(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]: ...
    async def tree(
        self, caller: Caller, session_id: str, path: str, *, below: bool = True
    ) -> tuple[Entry, Sequence[Entry]]:
        """The entry at the path, and with `below` everything below it by relative names, as the sandbox tells them."""

    async def make_folder(self, caller: Caller, session_id: str, path: str) -> None: ...
    async def remove(self, caller: Caller, session_id: str, path: str, *, recursive: bool = False) -> None:
        """Removes a file or an empty directory; with `recursive`, also one with everything in it. Follows no link."""

    async def list(self, caller: Caller, session_id: str, path: str = "", *, since: float = 0) -> Sequence[Entry]:
        """Everything below the path (empty: the workspace) that was modified since; names are absolute paths."""


class PortService(Protocol):
    async def connect(self, caller: Caller, session_id: str, port: int) -> PortConnection:
        """Connects to a server inside, on the sandbox's own loopback. The caller has to close the connection."""


class PortConnection(Protocol):
    """A byte stream to a server inside, each direction with an end of its own. It ends with the session."""

    async def read(self) -> bytes:
        """The next bytes, b"" at the end."""

    async def write(self, data: bytes) -> None:
        """Waits while the server does not read."""

    async def close_write(self) -> None: ...
    async def close(self) -> None: ...


class ApprovalService(Protocol):
    """Who may answer whom is in approvals.py."""

    @property
    def hears_dialogues(self) -> bool:
        """Whether what a person clicked in a program's own dialogue counts."""

    async def ask(self, caller: Caller, session_id: str, action: str, *, seconds: float | None = None) -> Approval:
        """Can be answered for that long (None: as long as the settings say)."""

    async def wait(self, caller: Caller, approval_id: str, seconds: float) -> Approval:
        """As it stands when it is settled, or after that long."""

    async def get(self, caller: Caller, approval_id: str) -> Approval: ...
    async def list(self, caller: Caller, *, all_states: bool = False) -> Sequence[Approval]:
        """Those that can be answered, or all on record; oldest first."""

    async def check_answer(self, caller: Caller, approval_id: str) -> None:
        """Raises the fault with which `answer` would refuse this caller now. Answers nothing."""

    async def answer(self, caller: Caller, approval_id: str, *, approved: bool, reason: str = "") -> Approval: ...


class ImageService(Protocol):
    """Who owns which image is in images.py; `tenant` is a tenant of the gateway, which only an admin may name."""

    async def pull(
        self, caller: Caller, name: str, credentials: Credentials | None, report: Report, tenant: str = ""
    ) -> NamedImage: ...
    async def add(
        self, caller: Caller, pieces: AsyncIterable[bytes], name: str, report: Report, tenant: str = ""
    ) -> NamedImage:
        """Imports an archive. Without a name it has the one that the archive says."""

    async def build_base(self, caller: Caller, report: Report) -> NamedImage: ...
    async def list(self, caller: Caller, name: str = "") -> Sequence[NamedImage]:
        """Those that the caller can use; or the one of that name, if there is one."""

    async def remove(self, caller: Caller, name: str, tenant: str = "") -> int:
        """How many bytes that freed: none, where another owner has the image too."""

    async def prune(self, caller: Caller, unused_for: float = 0, tenant: str = "") -> tuple[Sequence[str], int]:
        """Removes the caller's images that none of their sessions has and that were not used for that many seconds:
        their names, and how many bytes that freed."""


class WarmService(Protocol):
    """Sandboxes made ahead because a caller asked for it."""

    async def reserve(self, caller: Caller, name: str, spec: SessionSpec, number: int) -> PoolStatus:
        """Keeps that many sandboxes ready that can become such a session; with 0 the reservation is forgotten."""

    async def status(self, caller: Caller) -> PoolStatus: ...


class SandboxService(Protocol):
    """The part that every door needs."""

    @property
    def sessions(self) -> SessionService: ...
    @property
    def runs(self) -> RunService: ...
    @property
    def files(self) -> FileService: ...
    @property
    def default_limits(self) -> Limits:
        """The limits of a session whose spec names none."""

    async def status(self, caller: Caller) -> ServiceStatus: ...

    async def expose(self) -> None:
        """A door listens beyond loopback: from now on tenants have quotas where the settings say nothing."""

    def turn_away(self, who: str, call: str, code: str, source: str = "") -> None:
        """A door refused a call: for the log of refusals. `who` is what is known of the caller, `source` is the
        address of an unauthenticated peer."""


class WholeService(SandboxService, Protocol):
    """For doors that also have approvals, images, ports and terminals."""

    @property
    def approvals(self) -> ApprovalService: ...
    @property
    def images(self) -> ImageService: ...
    @property
    def ports(self) -> PortService: ...
    @property
    def terminals(self) -> TerminalService: ...
