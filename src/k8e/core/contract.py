"""What doors may ask of core: the only way in. `Service` implements all of it."""

from __future__ import annotations

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
)
from k8e.engine import Limits
from k8e.engine.images import Credentials, Report
from k8e.link.model import CommandInfo, Entry


class SandboxService(Protocol):
    """The only place that decides. Every door calls this and nothing below it. Raises Fault."""

    async def create(self, caller: Caller, spec: SessionSpec) -> Session: ...
    async def subagent(self, caller: Caller, parent_session_id: str, spec: ChildSpec) -> Session:
        """A session that shares another one's workspace, may not do more than it, and ends with it."""

    async def get(self, caller: Caller, session_id: str) -> Session: ...
    async def sessions(self, caller: Caller, *, all_phases: bool = False) -> Sequence[Session]: ...
    async def destroy(self, caller: Caller, session_id: str) -> None: ...
    async def stop_session(self, caller: Caller, session_id: str) -> Session:
        """Ends what runs in a persistent one and keeps its files. Fine for one that is stopped."""

    async def start_session(
        self,
        caller: Caller,
        session_id: str,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        """Brings it back on its files. Fine for one that runs, unless there is something new for it. `env` comes on top
        of what it had; its secrets have to be given again."""

    async def set_hosts(self, caller: Caller, session_id: str, change: HostsChange) -> Session:
        """In force and on record when it returns; connections that are not allowed any more are cut."""

    async def run(self, caller: Caller, spec: RunSpec) -> RunResult: ...
    async def start(self, caller: Caller, spec: RunSpec) -> LiveRun: ...
    async def start_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> LiveRun:
        """In a session of its own that ends with it, whatever becomes of the caller or of us. `keep`: it stays once the
        command has started. The run's own session_id is not looked at."""

    async def run_once(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool = False) -> RunResult:
        """The same, to its end."""

    async def signal(self, caller: Caller, run_id: str, number: int) -> None:
        """To a run that somebody waits for. Fine for one that has ended already, like the next."""

    async def resize(self, caller: Caller, run_id: str, rows: int, columns: int) -> None: ...
    async def poll(self, caller: Caller, run_id: str) -> RunResult:
        """How a run stands. While it runs there are exact counts and no output; a background run that has ended has its
        output, as long as its session lives and keeps it."""

    async def kill(self, caller: Caller, run_id: str) -> None: ...
    async def ps(self, caller: Caller, session_id: str) -> Sequence[CommandInfo]: ...
    async def log(self, caller: Caller, session_id: str) -> Sequence[RunResult]:
        """The runs of a session, oldest first, without output."""

    async def write_file(self, caller: Caller, session_id: str, path: str, content: bytes, *, append: bool) -> int:
        """How many bytes were written. Missing directories are made."""

    async def read_file(self, caller: Caller, session_id: str, path: str) -> bytes: ...
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
        """Of any size; how many bytes they were. Pieces are taken as fast as they can be written."""

    async def download(
        self, caller: Caller, session_id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]: ...
    async def pip_install(
        self, caller: Caller, session_id: str, packages: Sequence[str], *, seconds: float | None = None
    ) -> RunResult: ...
    async def tree(self, caller: Caller, session_id: str, path: str) -> tuple[Entry, Sequence[Entry]]:
        """What is at the path, and everything below it by names that begin there, as the sandbox says them."""

    async def make_folder(self, caller: Caller, session_id: str, path: str) -> None: ...
    async def list_files(self, caller: Caller, session_id: str, path: str = "", *, since: float = 0) -> Sequence[Entry]:
        """Everything below the path (empty: the workspace) that was modified since; names are absolute paths."""

    async def status(self, caller: Caller) -> ServiceStatus: ...

    def expose(self) -> None:
        """A door listens beyond loopback: from now on tenants have quotas where the settings say nothing."""

    def turn_away(self, who: str, call: str, code: str, source: str = "") -> None:
        """A door refused a call: for the log of refusals. `who` is what is known of the caller, `source` is where a
        stranger comes from."""

    @property
    def default_limits(self) -> Limits:
        """What a session gets that says nothing."""


class LiveRun(Protocol):
    """A foreground run whose output is read as it comes. Leaving it unfinished ends the command.

    stdin is open until `close_stdin`, unless the spec brought it. Input that nobody reads any more is dropped.
    """

    @property
    def run_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    def output(self) -> AsyncIterator[Chunk]: ...
    async def write_stdin(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def signal(self, number: int) -> None:
        """To the command and whatever is in its process group, as a terminal would send it."""

    async def resize(self, rows: int, columns: int) -> None:
        """Of its terminal."""

    async def result(self) -> RunResult:
        """After the output ended; stdout and stderr are empty here, the counts are exact."""

    async def kill(self) -> None:
        """Ends the whole tree, if it still runs. Whoever leaves before the result calls this."""


class ApprovalService(Protocol):
    """Raises Fault. Who may answer whom is in approvals.py."""

    @property
    def hears_dialogues(self) -> bool:
        """Whether what a person clicked in a program's own dialogue counts."""

    async def ask(self, caller: Caller, session_id: str, action: str, *, seconds: float | None = None) -> Approval:
        """Can be answered for that long (None: as long as the settings say)."""

    async def await_answer(self, caller: Caller, approval_id: str, seconds: float) -> Approval:
        """As it stands when it is settled, or after that long."""

    async def approval(self, caller: Caller, approval_id: str) -> Approval: ...
    async def approvals(self, caller: Caller, *, all_states: bool = False) -> Sequence[Approval]:
        """Those that can be answered, or all on record; oldest first."""

    async def answer(self, caller: Caller, approval_id: str, *, approved: bool, reason: str = "") -> Approval: ...


class ImageService(Protocol):
    """Raises Fault. Whose images are whose is in images.py; `tenant` is one of the gateway's, for admins."""

    async def pull_image(
        self, caller: Caller, name: str, credentials: Credentials | None, report: Report, tenant: str = ""
    ) -> NamedImage: ...
    async def import_image(
        self, caller: Caller, pieces: AsyncIterable[bytes], name: str, report: Report, tenant: str = ""
    ) -> NamedImage:
        """An archive; without a name the one that it says itself."""

    async def build_base(self, caller: Caller, report: Report) -> NamedImage: ...
    async def images(self, caller: Caller, name: str = "") -> Sequence[NamedImage]:
        """Those that the caller can use; or the one of that name, if there is one."""

    async def remove_image(self, caller: Caller, name: str, tenant: str = "") -> int:
        """How many bytes that gave: none, where somebody else has it too."""

    async def prune_images(self, caller: Caller, unused_for: float = 0, tenant: str = "") -> tuple[Sequence[str], int]:
        """The caller's that no session of theirs has, and that were not used for that many seconds: their names, and
        how many bytes that gave."""


class WarmService(Protocol):
    """Sandboxes made ahead because somebody said so. Raises Fault."""

    async def reserve(self, caller: Caller, name: str, spec: SessionSpec, number: int) -> PoolStatus:
        """So many sandboxes that can become such a session are ready from now on; none: it is forgotten."""

    async def pool(self, caller: Caller) -> PoolStatus: ...


class WholeService(SandboxService, ApprovalService, ImageService, Protocol):
    """For doors that have all of it."""
